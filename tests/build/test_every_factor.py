"""Every registered factor changes what is trained: from a recipe's table to the weights after two steps.

With the factor and without it (or with another in its place) the same groups go through resolve_objective, make_batch
and the trainer. A factor whose weights are the same either way does nothing, and a recipe that names it is misled.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from temper.batching import CreditRules, make_batch, pack, rows_of_groups
from temper.build import resolve_objective
from temper.config import RunConfig, resolve
from temper.errors import UserError
from temper.models.load import prepare
from temper.models.scorer import load_scorer
from temper.models.tiny import character_tokenizer, make_tiny_model
from temper.objectives import Objective, PolicyObjective
from temper.objectives.losses.pairs import PAIR_LOSSES
from temper.objectives.losses.scores import SCORE_LOSSES
from temper.objectives.resolve import REGISTRY
from temper.stages.kinds import KINDS
from temper.trainer.critic import Critic
from temper.trainer.local import AuxiliaryModels, LocalTrainer, TrainerSettings
from temper.trainer.optim import OptimizerSettings
from temper.types import Batch, Completion, Finish, Group, Message, Sample, Score, Status, Task, Trajectory, Turn

VOCABULARY, LONGEST = 30, 12
OPTIMIZER = OptimizerSettings(learning_rate=0.01, max_grad_norm=1e6)
Table = dict[str, Any]

KL = {"name": "kl", "coefficient": 0.1}
OPTIONS: dict[tuple[str, str], Table] = {
    ("shaping", "soft_overlong"): {"buffer": 6},
    ("shaping", "length_exact"): {"target": 2, "alpha": 0.1},
    ("shaping", "length_max"): {"target": 2, "alpha": 0.1},
    ("shaping", "stop_properly"): {"factor": 0.5},
    ("shaping", "clip_reward"): {"low": 0.0, "high": 0.5},
    ("shaping", "kl_in_reward"): {"coefficient": 0.5},
    ("advantage", "returns_to_go"): {"gamma": 0.9},
    ("normalizers", "clip_advantages"): {"limit": 0.3},
    ("normalizers", "drop_small"): {"threshold": 0.15},
    ("normalizers", "gaussian_noise"): {"sigma": 0.5},
    ("critic", "gae_targets"): {"lam": 0.0},
    ("gate", "cispo"): {"cap": 0.9},
    ("gate", "dppo_tv"): {"low": 1e-3, "high": 1e-3},
    ("gate", "dppo_kl"): {"low": 1e-4, "high": 1e-4},
    ("gate", "dppo_topk"): {"k": 4, "low": 1e-3, "high": 1e-3},
    ("gate", "quad"): {"low": 1e-3, "high": 1e-3},
    ("emphasis", "top_choice_penalty"): {"factor": 3.0, "quantile": 0.0},
    ("corrections", "veto"): {"threshold": 0.9},
    ("corrections", "kl_keep"): {"high": 0.01, "level": "token"},
    ("corrections", "opsm"): {"threshold": 0.0},
    ("corrections", "m2po"): {"threshold": 0.01},
    ("corrections", "top_entropy"): {"share": 0.3},
    ("corrections", "clip_cov"): {"share": 0.3, "low": -10.0, "high": 10.0},
    ("weighting", "length_softmax"): {"power": 1.0},
    ("regularizers", "kl"): {"coefficient": 0.1},
    ("regularizers", "entropy_bonus"): {"coefficient": 0.1},
    ("regularizers", "kl_cov"): {"share": 0.5},
    ("regularizers", "behavior_square"): {"coefficient": 0.1},
    ("controllers", "adaptive_kl"): {"target": 0.01, "horizon": 10},
    ("controllers", "adaptive_entropy"): {"target": 10.0, "step": 0.1},
    ("controllers", "learned_length"): {"rate": 1.0},
    ("reference", "reset"): {"every": 1},
    ("reference", "soft_update"): {"every": 1},
}
"""Arguments that a factor needs, or with which a rule made for thousands of tokens does something to fifty."""

BASES: dict[str, Table] = {
    "advantage": {"preset": "reinforce"},
    "critic": {"preset": "ppo"},
    "gate": {"preset": "grpo", "proximal": "behavior"},
    "gate none": {"preset": "grpo"},
    "advantage gae": {"preset": "reinforce", "critic": "gae_targets"},
    "advantage gae_by_length": {"preset": "reinforce", "critic": "gae_targets"},
    "controllers adaptive_kl": {"preset": "grpo", "regularizers": [KL]},
    "controllers adaptive_entropy": {
        "preset": "grpo",
        "regularizers": [{"name": "entropy_bonus", "coefficient": 1.0}],
    },
    "controllers learned_length": {"preset": "lambda_grpo"},
    "controllers margin_memory": {"preset": "beta_dpo"},
    "reference": {"preset": "grpo", "regularizers": [KL]},
    "step": {"preset": "grpo", "gate": "importance"},
}
"""By kind, or kind and name: what the factor is put into; else grpo."""

COMPANIONS = {"batch_normalize": ["token_tis"], "kept_denominator": ["top_entropy"]}
"""Corrections that act on other corrections."""
RIVALS: dict[str, tuple[Any, Any]] = {
    "advantage": ("raw", "group_mean"),
    "critic": ({"name": "gae_targets", "lam": 0.95}, None),
    "proximal": ("trainer", "behavior"),
    "ratio": ("token", "sequence_product"),
    "gate": ("importance", "clip"),
    "weighting": ("token_mean", "sequence_mean"),
    "reference": ("none", None),
    "step": ("none", None),
}
"""Of a kind that takes one: what stands in the factor's place, and what when it is that itself."""
FACTORS = [(kind, name) for kind, known in REGISTRY.items() for name in known]


def tables(kind: str, name: str) -> tuple[Table, Table]:
    """Objective tables of a recipe with the factor, and of one without it."""
    spec = {"name": name, **OPTIONS.get((kind, name), {})}
    base = BASES.get(f"{kind} {name}", BASES.get(kind, {"preset": "grpo"}))
    if kind == "loss":
        family = PAIR_LOSSES if name in PAIR_LOSSES else SCORE_LOSSES if name in SCORE_LOSSES else {name: None}
        rivals = {"dpo": "ipo", "likelihood": {"name": "likelihood", "smoothing": 0.5}, "gkd": "k2", "k2": "k3"}
        rival = rivals.get(name) or ("dpo" if family is PAIR_LOSSES else "gkd")
        preset = "beta_dpo" if name == "beta_dpo" else "dpo" if family is PAIR_LOSSES else "gkd"
        if family is SCORE_LOSSES:
            return {"preset": "reward_model", kind: spec}, {}
        return {"preset": preset, kind: spec}, {"preset": "dpo" if family is PAIR_LOSSES else preset, kind: rival}
    if kind in RIVALS:
        first, second = RIVALS[kind]
        rival = second if first == name else first
        without = base | {kind: rival}
        if kind == "advantage":
            without.pop("critic", None)
        return base | {kind: spec}, without
    others = COMPANIONS.get(name, [])
    return base | {kind: [*others, spec]}, base | {kind: others}


def config_of(objective: Table) -> RunConfig:
    direct_loss = objective.get("loss", {})
    name = direct_loss if isinstance(direct_loss, str) else direct_loss.get("name", "")
    kinds = [kind.name for kind in KINDS.values() if name in kind.losses]
    stage = kinds[-1] if name else "preference" if objective["preset"] == "beta_dpo" else "rl"
    table = {
        "model": {"new": {}, "teacher": "somewhere"},
        "train": [{"generator": "spell_backward"}],
        "reward": [{"kind": "edit"}],
        "rollout": {"groups_per_step": 4, "group_size": 4},
        "sampling": {"max_new_tokens": LONGEST},
        "objective": objective,
        "trainer": {"updates_per_batch": 1 if "step" in objective else 2},
        "stage": [{"kind": stage, "steps": 10}],
    }
    return resolve(table, [], where="test")[0]


@cache
def language_model(seed: int, has_experts: bool = False) -> Any:
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
    }  # fmt: skip
    experts = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if has_experts:
            return prepare(Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts)))
        model = LlamaForCausalLM(LlamaConfig(**shape))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3)
        return prepare(model.double())


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Any]:
    folder: Path = tmp_path_factory.mktemp("scorer") / "model"
    make_tiny_model(
        folder, layers=1, width=16, heads=2, kv_heads=1, mlp_width=24, context=32, alphabet="abcdefghijkl", seed=0
    )
    return lambda: load_scorer(folder, torch.float64, torch.device("cpu"))


def groups() -> list[Group]:
    """Of one or two turns, some cut; with everything that any factor reads of a rollout."""
    draw = random.Random(5)
    return [
        Group(
            id=f"g{place}",
            draw=place,
            task=Task(id=f"t{place}", messages=(Message(role="user", content=""),)),
            trajectories=tuple(member(draw, f"g{place}", index) for index in range(4)),
            greedy=replace(member(draw, f"g{place}", -1), score=Score.of(0.4)),
        )
        for place in range(4)
    ]


def member(draw: random.Random, group: str, index: int) -> Trajectory:
    prompt, turns = [1, 2, 3], []
    for number in range(1 + index % 2):
        completion = completed(draw, prompt)
        said = Message(role="assistant", content="")
        turns.append(Turn(completion=completion, message=said, reward=draw.choice([0.0, 0.5]) if number else 0.25))
        prompt = [*prompt, *completion.token_ids, 4]
    total = sum(len(turn.completion.token_ids) for turn in turns)
    right = [1.0, 0.0, 0.5, 0.45][index]
    parts = {"right": Score.of(right), "short": Score.of(draw.random())}
    return Trajectory(
        task_id="t",
        group_id=group,
        index=index,
        turns=tuple(turns),
        status=Status.TRUNCATED_LENGTH if index == 2 else Status.COMPLETED,
        score=Score.of(right),
        score_parts=parts,
        weighted_parts=parts,
        step_starts=(0, total // 2) if total > 1 else (0,),
        step_values=(0.3, 0.6) if total > 1 else (0.3,),
    )


def completed(draw: random.Random, prompt: Sequence[int]) -> Completion:
    drawn = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, LONGEST))]
    likely = [draw.sample(range(VOCABULARY), 4) for _ in drawn]
    return Completion(
        prompt_ids=tuple(prompt),
        token_ids=drawn,
        logprobs=[draw.uniform(-5.0, -2.0) for _ in drawn],
        versions=[0] * len(drawn),
        finish=Finish.STOP,
        top_ids=likely,
        top_logprobs=[sorted((draw.uniform(-4.0, -2.0) for _ in ids), reverse=True) for ids in likely],
    )


TEACHERS = {"teacher", "teacher_top_k", "divergence"}


def make_trainer(config: RunConfig, objective: Objective, model: Any) -> LocalTrainer:
    has_critic = isinstance(objective, PolicyObjective) and objective.critic is not None
    critic = Critic(deepcopy(model), OPTIMIZER, total_steps=config.steps) if has_critic else None
    others = AuxiliaryModels(
        reference=deepcopy(language_model(1)) if "reference" in objective.needs else None,
        teachers={"": deepcopy(language_model(2))} if objective.needs & TEACHERS else {},
        critic=critic,
    )
    together = KINDS[config.stage].together
    return LocalTrainer(
        model,
        character_tokenizer("abc"),
        objective,
        TrainerSettings(optimizer=OPTIMIZER, temperature=1.0, total_steps=config.steps),
        pack=partial(pack, tokens_per_microbatch=60, dtype=torch.float64, together=together),
        others=others,
    )


def batches(config: RunConfig, objective: Objective, trainer: LocalTrainer) -> Iterator[Batch]:
    """Two, each made when the one before it has been trained."""
    updates = config.trainer.updates_per_batch
    rules = CreditRules(
        objective=objective,
        max_new_tokens=LONGEST,
        updates=updates,
        part_weights={"right": 1.0, "short": 1.0},
    )
    for _ in range(2):
        if config.stage in ("preference", "reward_model"):
            rows = compared_rows(objective)
            half = len(rows) // updates
            yield Batch(updates=tuple(tuple(rows[half * place :][:half]) for place in range(updates)))
        else:
            yield make_batch(groups(), rules, score=trainer.score, version=trainer.version, scales=trainer.scales)


def compared_rows(objective: Objective) -> list[Sample]:
    """The first two members of every group as a pair: right and wrong, the policy's and the reference's."""
    is_scored = "scores" in objective.needs
    rows = [row for row in rows_of_groups(groups()) if row.index < 2]
    return [replace(row, **as_compared(row, is_scored)) for row in rows]


def as_compared(row: Sample, is_scored: bool) -> dict[str, Any]:
    mask = [0] * (len(row.token_ids) - 1) + [1] if is_scored else row.loss_mask
    columns: dict[str, Any] = {
        "loss_mask": mask,
        "advantages": [(0.7 if row.index == 0 else 0.0) * drawn for drawn in mask],
        "weights": [0.25 * drawn for drawn in mask],
        "versions": [-1 if row.index else version for version in row.versions],
        "reward": 1.0 - row.index,
        "top_ids": None,
        "top_logprobs": None,
    }
    return columns | ({"token_ids": [token % 12 for token in row.token_ids]} if is_scored else {})


def weights_of(objective_table: Table, scorer: Callable[[], Any], *, is_trained: bool = True) -> Mapping[str, Tensor]:
    config = config_of(objective_table)
    objective = resolve_objective(config)
    model = scorer() if "scores" in objective.needs else deepcopy(language_model(0, "router" in objective.needs))
    trainer = make_trainer(config, objective, model)
    if is_trained:
        for batch in batches(config, objective, trainer):
            trainer.step(batch)
    return {name: tensor.clone() for name, tensor in trainer.publish().tensors.items()}


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return max((tensor - other[name]).abs().max().item() for name, tensor in one.items())


@pytest.mark.parametrize(("kind", "name"), FACTORS, ids=lambda text: text)
def test_a_factor_changes_the_weights(kind: str, name: str, scorer: Callable[[], Any]) -> None:
    table, without = tables(kind, name)
    found = weights_of(table, scorer)
    assert all(tensor.isfinite().all() for tensor in found.values())
    if name == "margin_memory":
        with pytest.raises(UserError, match="margin_memory"):
            weights_of(without, scorer)
        without = {}
    if name == "router_shift":  # of another model: the same experts without the rule
        moved = language_model(0, has_experts=True)
        assert difference(found, dict(moved.named_parameters())) > 1e-6
        return
    # Losses of scores have no rival on the same rows: what they do is to train.
    other = weights_of(without or table, scorer, is_trained=bool(without))
    assert difference(found, other) > 1e-7, f"objective.{kind} = {name} trains as if it were not there"


def test_equal_recipes_train_equal_weights(scorer: Callable[[], Any]) -> None:
    """So that a difference is the factor's, and not noise."""
    table, _ = tables("gate", "clip")
    assert difference(weights_of(table, scorer), weights_of(table, scorer)) == 0.0


def test_a_factor_that_does_nothing_would_be_noticed(
    scorer: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("temper.objectives.objective.shaped", lambda objective, credit: credit)
    table, without = tables("shaping", "soft_overlong")
    assert difference(weights_of(table, scorer), weights_of(without, scorer)) == 0.0
