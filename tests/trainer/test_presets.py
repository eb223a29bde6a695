"""Every policy gradient through the real trainer: one step is a function of its rows, whatever passes it needs.

Direct losses need rows of their own: test_preferences.py, test_scores.py, test_distilling.py, stages/test_sft.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from temper.batching.pack import pack
from temper.models.load import prepare
from temper.models.tiny import character_tokenizer
from temper.objectives import POLICY_GRADIENTS, Objective, measure_batch, resolve
from temper.trainer.critic import Critic
from temper.trainer.local import AuxiliaryModels, LocalTrainer, TrainerSettings
from temper.trainer.optim import OptimizerSettings
from temper.trainer.passes.forward import StepFacts, forward_backward
from temper.trainer.passes.scoring import ScoringPasses, Share
from temper.types import Batch, Sample
from tests.fakes.selection import mostly_heavy, mostly_slow

OPTIMIZER = OptimizerSettings(learning_rate=0.01, max_grad_norm=1e6)
FREQUENT = {"clip_cov": {"corrections": [{"name": "clip_cov", "share": 0.1, "low": 0.0}]}}
"""At the preset's 0.02% a test of sixty tokens would choose one; here several are."""

USUAL = ("ppo", "grpo", "dapo", "gspo", "cispo", "sapo", "clip_cov", "prorl", "reinforce_pp")
WITH_TERMS = ("grpo with kl", "grpo with entropy")
WITH_GRADIENT = [name for name, preset in POLICY_GRADIENTS.items() if preset.step is None]
"""Those that take no step of their own."""


def columns_of(rows: Sequence[Sample], vocabulary: int = 40) -> list[Sample]:
    """The rows with every column that any objective may read. Behaviour is near enough for bounds to act on a part."""
    draw = random.Random(7)

    def near(row: Sample, middle: float, width: float) -> list[float]:
        return [draw.uniform(middle - width, middle + width) * drawn for drawn in row.loss_mask]

    filled = []
    rewards = {(row.group_id, row.index): float(draw.random() < 0.5) for row in rows}
    for row in rows:
        tops = [draw.sample(range(vocabulary), 20) if drawn else [] for drawn in row.loss_mask]
        filled.append(
            replace(
                row,
                behavior_logprobs=near(row, -3.7, 0.4),
                reference_logprobs=near(row, -3.7, 0.4),
                teacher_logprobs=near(row, -3.7, 0.4),
                values=near(row, 0.3, 0.2),
                targets=near(row, 0.5, 0.5),
                top_ids=tops,
                top_logprobs=[[draw.uniform(-4.5, -3.2) for _ in top] for top in tops],
                reward=rewards[row.group_id, row.index],
                weight_slope=draw.uniform(-1, 1),
            )
        )
    return filled


def mixture_of_experts() -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64,
    )  # fmt: skip
    return prepare(Qwen3MoeForCausalLM(config))


def objective_of(name: str) -> Objective:
    return resolve(name, FREQUENT.get(name))


def make_trainer(model: Any, objective: Objective, budget: int) -> LocalTrainer:
    others = AuxiliaryModels(
        reference=deepcopy(model) if "reference" in objective.needs else None,
        teachers={"": deepcopy(model)} if "teacher" in objective.needs else {},
        critic=Critic(deepcopy(model), OPTIMIZER, total_steps=10) if objective.critic is not None else None,
    )
    return LocalTrainer(
        model,
        character_tokenizer("abc"),
        objective,
        TrainerSettings(optimizer=OPTIMIZER, temperature=0.9, total_steps=10),
        pack=partial(pack, tokens_per_microbatch=budget, dtype=torch.float64),
        others=others,
    )


def train(model: Any, objective: Objective, rows: Sequence[Sample], budget: int) -> tuple[Any, list[dict[str, float]]]:
    """Weights and metrics of a step with two updates and one with a single update."""
    trainer = make_trainer(deepcopy(model), objective, budget)
    middle = len(rows) // 2
    batches = (Batch(updates=(tuple(rows[:middle]), tuple(rows[middle:]))), Batch(updates=(tuple(rows),)))
    metrics = [dict(trainer.step(batch).metrics) for batch in batches]
    return {name: tensor.clone() for name, tensor in trainer.publish().tensors.items()}, metrics


def difference(first: Any, second: Any) -> float:
    """Largest difference of any weight or metric."""
    by_weight = [(first[0][name] - second[0][name]).abs().max().item() for name in first[0]]
    by_metric = []
    for one, other in zip(first[1], second[1], strict=True):
        assert one.keys() == other.keys()
        by_metric += [abs(one[name] - other[name]) for name in one]
    return max(*by_weight, *by_metric)


def shuffle(rows: Sequence[Sample]) -> list[Sample]:
    """Trajectories in another order; the rows of one stay in the order of its turns."""
    keys = list(dict.fromkeys((row.group_id, row.index) for row in rows))
    random.Random(0).shuffle(keys)
    return [row for key in keys for row in rows if (row.group_id, row.index) == key]


@pytest.mark.parametrize("name", mostly_heavy(POLICY_GRADIENTS, keep=USUAL))
def test_a_step_does_not_depend_on_microbatches_or_order(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]], name: str
) -> None:
    objective = objective_of(name)
    model = mixture_of_experts() if "router" in objective.needs else make_model()
    rows = columns_of(make_rows(num_groups=4))
    whole = train(model, objective, rows, budget=10_000)
    is_waiting = objective.critic is not None and objective.critic.argument("pretraining_steps") > 0
    if not is_waiting and name != "geo_rs":  # which rejects everything here: random log-probabilities are far apart
        start = dict(model.named_parameters())
        assert max((whole[0][n] - start[n]).abs().max().item() for n in start) > 1e-4, "nothing was trained"
    tolerance = 1e-3 if "router" in objective.needs else 1e-7  # experts are multiplied in float32 at most
    assert difference(whole, train(model, objective, rows, budget=1)) < tolerance
    half = len(rows) // 2
    shuffled = [*shuffle(rows[:half]), *shuffle(rows[half:])]
    assert difference(whole, train(model, objective, shuffled, budget=33)) < tolerance


def half_without_credit(rows: Sequence[Sample]) -> list[Sample]:
    """As a batch of groups that all passed or all failed beside others."""
    groups = sorted({row.group_id for row in rows})[::2]
    return [replace(row, advantages=[0.0] * len(row.advantages)) if row.group_id in groups else row for row in rows]


@pytest.mark.parametrize("name", mostly_slow([*WITH_GRADIENT, *WITH_TERMS], keep=[*USUAL, *WITH_TERMS]))
def test_rows_without_credit_train_as_if_they_had_a_backward_pass(
    make_model: Callable[..., Any],
    make_rows: Callable[..., list[Sample]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    regularizers = {"grpo with kl": "kl", "grpo with entropy": "entropy_bonus"}
    changed = {"regularizers": [{"name": regularizers.get(name, ""), "coefficient": 0.1}]}
    objective = resolve("grpo", changed) if name in regularizers else objective_of(name)
    model = mixture_of_experts() if "router" in objective.needs else make_model()
    rows = half_without_credit(columns_of(make_rows(num_groups=4)))
    saved = train(model, objective, rows, budget=33)
    monkeypatch.setattr("temper.trainer.policy_step.forward_only", lambda *_, **__: None)
    assert difference(saved, train(model, objective, rows, budget=33)) == 0.0


def test_rows_without_credit_have_no_backward_pass_unless_something_pulls_at_them(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]], monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[bool] = []

    def counted(model: Any, microbatch: Any, *others: Any, **settings: Any) -> Any:
        passed.append(microbatch.has_credit)
        return forward_backward(model, microbatch, *others, **settings)

    monkeypatch.setattr("temper.trainer.policy_step.forward_backward", counted)
    rows = half_without_credit(columns_of(make_rows(num_groups=4)))
    train(make_model(), resolve("grpo"), rows, budget=33)
    assert passed
    assert all(passed)
    passed.clear()
    train(make_model(), resolve("grpo", {"regularizers": [{"name": "kl", "coefficient": 0.1}]}), rows, budget=33)
    assert not all(passed)


def test_leaving_them_out_unseen_would_be_noticed(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutation: rows without credit are taken to have no gradient, whatever the objective."""
    objective = resolve("grpo", {"regularizers": [{"name": "kl", "coefficient": 0.1}]})
    rows = half_without_credit(columns_of(make_rows(num_groups=4)))
    right = train(make_model(), objective, rows, budget=33)
    monkeypatch.setattr("torch.autograd.grad", lambda loss, leaves, **_: [None for _ in leaves])
    assert difference(right, train(make_model(), objective, rows, budget=33)) > 1e-4


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov", "top_entropy"])
def test_statistics_of_a_microbatch_alone_would_be_noticed(
    make_model: Callable[..., Any],
    make_rows: Callable[..., list[Sample]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    def locally(self: ScoringPasses, share: Share, facts: StepFacts) -> list[dict[str, torch.Tensor]]:
        tokens = [facts.tokens(m, self._scored(m)) for m in share.microbatches]
        return [measure_batch(objective, part) for part in tokens]

    model, objective, rows = make_model(), objective_of(name), columns_of(make_rows(num_groups=4))
    whole = train(model, objective, rows, budget=10_000)
    monkeypatch.setattr(ScoringPasses, "measure", locally)
    assert difference(whole, train(model, objective, rows, budget=33)) > 1e-4


@pytest.mark.parametrize("name", ["ppo", "prorl", "lambda_grpo", "adaptive"])
def test_critics_references_and_controllers_resume_to_the_same_bits(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]], tmp_path: Path, name: str
) -> None:
    adaptive = {
        "regularizers": [{"name": "kl", "coefficient": 0.1}, {"name": "entropy_bonus", "coefficient": 1.0}],
        "controllers": [
            {"name": "adaptive_kl", "target": 0.5, "horizon": 50},
            {"name": "adaptive_entropy", "target": 3.0},
        ],
    }
    changes = {"prorl": {"reference": {"name": "reset", "every": 3}}, "adaptive": adaptive}
    objective = resolve("grpo" if name == "adaptive" else name, changes.get(name))
    batches = [Batch(updates=(tuple(columns_of(make_rows(seed=seed))),)) for seed in range(5)]

    straight = make_trainer(make_model(), objective, 40)
    expected = [straight.step(batch).metrics for batch in batches]
    first = make_trainer(make_model(), objective, 40)
    for batch in batches[:3]:
        first.step(batch)
        first.observe(0.5)
    (tmp_path / "saved").mkdir()
    first.save(tmp_path / "saved")
    second = make_trainer(make_model(seed=3), objective, 40)
    second.load(tmp_path / "saved")
    found = [second.step(batch).metrics for batch in batches[3:]]

    assert found == expected[3:]
    assert all(torch.equal(t, second.publish().tensors[n]) for n, t in straight.publish().tensors.items())
    assert second.scales == straight.scales


def test_a_critic_is_trained_alone_before_the_policy(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]]
) -> None:
    model = make_model()
    trainer = make_trainer(model, resolve("vapo", {"critic": {"pretraining_steps": 2}}), 40)
    before = {name: tensor.clone() for name, tensor in trainer.publish().tensors.items()}
    rows = columns_of(make_rows())
    values = trainer.score(rows, "critic")
    moved = []
    for _ in range(3):
        trainer.step(Batch(updates=(tuple(rows),)))
        moved.append(any(not torch.equal(t, before[n]) for n, t in trainer.publish().tensors.items()))
    assert moved == [False, False, True]
    assert trainer.score(rows, "critic") != values


def test_the_schedule_of_the_policy_begins_when_the_policy_does(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warm-up and decay over the steps in which the policy is trained; the critic's run over all of them."""
    optimizer = OptimizerSettings(learning_rate=1.0, schedule="linear", warmup_steps=2, max_grad_norm=1e6)
    objective = resolve("vapo", {"critic": {"pretraining_steps": 4}})
    model, policy, critic = make_model(), [], []
    others = AuxiliaryModels(critic=Critic(deepcopy(model), optimizer, total_steps=10))
    settings = TrainerSettings(optimizer=optimizer, temperature=1.0, total_steps=10)
    packed = partial(pack, tokens_per_microbatch=40, dtype=torch.float64)
    trainer = LocalTrainer(model, None, objective, settings, pack=packed, others=others)
    assert others.critic is not None

    def noted(rates: list[float]) -> Callable[[float, torch.Tensor], torch.Tensor]:
        def apply(rate: float, norm: torch.Tensor) -> torch.Tensor:
            rates.append(rate)
            return torch.stack([norm, norm])

        return apply

    monkeypatch.setattr(trainer._optimizer, "step", noted(policy))
    monkeypatch.setattr(others.critic._optimizer, "step", noted(critic))
    rows = columns_of(make_rows())
    half = len(rows) // 2
    batch = Batch(updates=(tuple(rows[:half]), tuple(rows[half:])))
    reported = [trainer.step(batch).metrics["policy/learning_rate"] for _ in range(10)]
    assert reported == pytest.approx([0, 0, 0, 0, 0.5, 1.0, 1.0, 0.75, 0.5, 0.25])
    assert policy == [rate for rate in reported[4:] for _ in range(2)]
    falling = [0.5, 1.0, *(1 - place / 8 for place in range(8))]
    assert critic == pytest.approx([rate for rate in falling for _ in range(2)])


def test_a_reset_copies_the_policy_and_forgets_the_moments(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]]
) -> None:
    objective = resolve("prorl", {"reference": {"name": "reset", "every": 2}})
    trainer = make_trainer(make_model(), objective, 40)
    rows = [replace(row, reference_logprobs=None) for row in columns_of(make_rows())]
    batch = Batch(updates=(tuple(rows),))
    assert trainer.step(batch).metrics["policy/reference_moved"] == 0.0
    assert trainer.score(rows, "reference") != trainer.score(rows, "policy")
    assert trainer.step(batch).metrics["policy/reference_moved"] == 1.0
    assert trainer.score(rows, "reference") == trainer.score(rows, "policy")
    assert trainer._optimizer.num_steps == 0
    assert trainer.step(batch).metrics["policy/kl_ref_k3"] == 0.0


def test_a_stall_of_the_held_out_score_resets_the_reference(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]]
) -> None:
    trainer = make_trainer(
        make_model(), resolve("prorl", {"reference": {"name": "reset", "patience": 2, "every": 0}}), 40
    )
    rows = [replace(row, reference_logprobs=None) for row in columns_of(make_rows())]
    moved = []
    for score in (0.5, 0.6, 0.6, 0.55, 0.7):
        moved.append(trainer.step(Batch(updates=(tuple(rows),))).metrics["policy/reference_moved"])
        trainer.observe(score)
    assert moved == [0, 0, 0, 0, 1]


def test_a_soft_update_mixes_reference_and_policy(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]]
) -> None:
    objective = resolve("prorl", {"reference": {"name": "soft_update", "mix": 0.25, "every": 1}})
    model, reference = make_model(), make_model(seed=1)
    trainer = LocalTrainer(
        model,
        None,
        objective,
        TrainerSettings(optimizer=OPTIMIZER, temperature=1.0, total_steps=10),
        pack=partial(pack, tokens_per_microbatch=40, dtype=torch.float64),
        others=AuxiliaryModels(reference=reference),
    )
    before = {name: p.clone() for name, p in reference.named_parameters()}
    trainer.step(Batch(updates=(tuple(columns_of(make_rows())),)))
    policy = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        assert torch.allclose(parameter, 0.25 * policy[name] + 0.75 * before[name], atol=1e-12)
    assert trainer._optimizer.num_steps == 1


def test_the_metrics_of_an_adaptive_coefficient_are_its_definition(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]]
) -> None:
    objective = resolve(
        "grpo",
        {
            "regularizers": [{"name": "kl", "coefficient": 0.1}],
            "controllers": [{"name": "adaptive_kl", "target": 2.0, "horizon": 100}],
        },
    )
    trainer = make_trainer(make_model(), objective, 40)
    metrics = trainer.step(Batch(updates=(tuple(columns_of(make_rows())),))).metrics
    error = max(-0.2, min(0.2, metrics["policy/kl_ref_sequence"] / 2.0 - 1))
    assert metrics["data/trained_trajectories"] == 9
    assert metrics["control/kl"] == pytest.approx(1 + error * 9 / 100, rel=1e-12)
