"""Sampler and trainer mean the same distribution, whatever is left out: the mean ratio is 1, not the kept mass."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from temper.batching import CreditRules, make_batch, pack, rows_of
from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.engine.local.sampling import Draws, draw
from temper.errors import BackendError
from temper.models.load import prepare
from temper.models.states import Head
from temper.models.tiny import character_tokenizer
from temper.objectives import PRESETS, Objective, resolve
from temper.protocols import EnvOpening, EnvReply
from temper.rollout.episode import EpisodeSetup, require_as_asked, run_episode
from temper.trainer.local import AuxiliaryModels, LocalTrainer, TrainerSettings
from temper.trainer.optim import OptimizerSettings
from temper.trainer.passes import forward
from temper.trainer.passes.logprobs import KeepSets, drawn_logprobs
from temper.types import (
    Batch,
    Completion,
    Finish,
    Group,
    Message,
    Request,
    Sample,
    SamplingParams,
    Score,
    Status,
    Task,
    Trajectory,
    Turn,
)
from tests.fakes.episodes import FakeScorer, Letters
from tests.fakes.sampler import FakeSampler

GRID = list(itertools.product((0.6, 1.0, 1.5), (1.0, 0.7), (0, 4), (0.0, 0.08)))
"""Temperature, top_p, top_k, min_p."""
VOCABULARY = 61


def make_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return prepare(LlamaForCausalLM(config).to(dtype))


def make_trainer(
    model: Any, temperature: float, *, budget: int = 64, reference: Any = None, objective: Objective = PRESETS["dapo"]
) -> LocalTrainer:
    dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    settings = TrainerSettings(
        optimizer=OptimizerSettings(learning_rate=0.01, schedule="constant", warmup_steps=0, max_grad_norm=1e6),
        temperature=temperature,
        total_steps=10,
    )
    packing = partial(pack, tokens_per_microbatch=budget, dtype=dtype)
    others = AuxiliaryModels(reference=reference)
    return LocalTrainer(model, character_tokenizer("a"), objective, settings, pack=packing, others=others)


def completions(model: Any, params: SamplingParams, count: int = 12) -> list[Completion]:
    settings = EngineSettings(seed=7, block_size=8, num_blocks=100, max_running=8, tokens_per_step=64, max_length=64)
    engine = LocalEngine(model, settings)
    prompts = np.random.default_rng(0).integers(2, VOCABULARY, size=(4, 5)).tolist()

    async def draw_all() -> list[Completion]:
        requests = [Request(id=f"{i}", prompt_ids=tuple(prompts[i % 4]), params=params) for i in range(count)]
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    return asyncio.run(draw_all())


def episode(turns: Sequence[Completion], index: int = 0) -> Trajectory:
    said = Message(role="assistant", content="")
    return Trajectory(
        task_id="t",
        group_id="g",
        index=index,
        turns=tuple(Turn(completion=completion, message=said) for completion in turns),
        status=Status.COMPLETED,
        score=Score.of(1.0),
    )


def rows_from(drawn: Sequence[Completion]) -> list[Sample]:
    return [row for index, completion in enumerate(drawn) for row in rows_of(episode([completion], index))]


def log_ratios(rows: Sequence[Sample], scored: Sequence[Sequence[float]]) -> list[float]:
    return [
        again - sampled
        for row, values in zip(rows, scored, strict=True)
        for is_drawn, sampled, again in zip(row.loss_mask, row.behavior_logprobs, values, strict=True)
        if is_drawn
    ]


@pytest.mark.parametrize("cell", GRID, ids=str)
def test_the_mean_ratio_is_one_for_every_way_of_drawing(
    cell: tuple[float, float, int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    temperature, top_p, top_k, min_p = cell
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, max_new_tokens=20)
    model = make_model()
    drawn = completions(model, params)
    for completion in drawn:
        require_as_asked(Request(id="", prompt_ids=(), params=params), completion)
    rows = rows_from(drawn)
    trainer = make_trainer(model, temperature)
    ratios = log_ratios(rows, trainer.score(rows, "policy"))
    assert len(ratios) == 240
    assert max(map(abs, ratios)) < 2e-5
    assert np.exp(ratios).mean() == pytest.approx(1.0, abs=1e-4)
    if params.is_truncated:  # a trainer that knows nothing of it finds the kept mass instead
        monkeypatch.setattr(forward, "keep_sets", lambda *_: None)
        assert np.exp(log_ratios(rows, trainer.score(rows, "policy"))).mean() < 0.97


@pytest.mark.parametrize("cell", GRID, ids=str)
def test_from_equal_logits_sampler_and_trainer_get_equal_bits(cell: tuple[float, float, int, float]) -> None:
    temperature, top_p, top_k, min_p = cell
    count, vocabulary = 24, 1003
    logits = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(3)) * 3
    table = draw(
        logits,
        Draws(
            temperature_R=np.full(count, temperature, dtype=np.float32),
            random_key_R=np.arange(count, dtype=np.uint64),
            position_R=np.arange(count),
            top_k_R=np.full(count, top_k),
            top_p_R=np.full(count, top_p),
            min_p_R=np.full(count, min_p),
            num_top=3,
            entropy=True,
        ),
    )
    keep = None
    if table.kept_RV is not None:
        keep = KeepSets.of(table.kept_RV.nonzero()[:, 1], table.kept_RV.sum(-1), torch.device("cpu"))
    # States that pick one row of the head each: products with one and zero are exact.
    head = Head(logits.t().contiguous(), None, None)
    logprobs, entropy, top, _ = drawn_logprobs(
        head, torch.eye(count), table.tokens_RS[:, 0], temperature=temperature, top_ids_AK=table.top_ids_RK, keep=keep,
        chunk_bytes=5 * vocabulary * 4,
    )  # fmt: skip
    assert torch.equal(logprobs, table.logprobs_RS[:, 0])
    if keep is None:  # the sampler's is of what it drew from, the trainer's of the whole policy
        assert torch.equal(entropy, table.entropy_R)
    assert torch.equal(top, table.top_logprobs_RK)


TRUNCATED = SamplingParams(temperature=1.0, top_p=0.8, min_p=0.02, max_new_tokens=12)


def credited(rows: Sequence[Sample]) -> list[Sample]:
    total = sum(row.num_actions for row in rows)
    filled = []
    for place, row in enumerate(rows):
        advantage = math.sin(place + 1)
        filled.append(
            dataclasses.replace(
                row,
                advantages=[advantage * drawn for drawn in row.loss_mask],
                weights=[drawn / total for drawn in row.loss_mask],
            )
        )
    return filled


def test_a_truncated_step_has_ratio_one_and_the_same_gradient_for_every_microbatching() -> None:
    rows = credited(rows_from(completions(make_model(), TRUNCATED, count=6)))
    results = []
    for budget in (1, 30, 1000):
        trainer = make_trainer(make_model(dtype=torch.float64), 1.0, budget=budget)
        result = trainer.step(Batch(updates=(tuple(rows),)))
        assert result.metrics["policy/ratio_max"] == 1.0
        results.append((dict(result.metrics), {k: v.clone() for k, v in trainer.publish().tensors.items()}))
    for metrics, weights in results[1:]:
        assert metrics == pytest.approx(results[0][0], rel=1e-9, abs=1e-10)
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, results[0][1][name], rtol=1e-9, atol=1e-10)


def without_sets(rows: Sequence[Sample]) -> list[Sample]:
    return [dataclasses.replace(row, keep_ids=None) for row in rows]


def at_drawn(rows: Sequence[Sample], scored: Sequence[Sequence[float]]) -> list[float]:
    return [
        x for row, values in zip(rows, scored, strict=True) for x, m in zip(values, row.loss_mask, strict=True) if m
    ]


def test_a_distance_from_the_reference_and_the_entropy_are_those_of_whole_policies() -> None:
    """Though tokens are drawn within keep-sets, and ratios are taken there."""
    rows = credited(rows_from(completions(make_model(), TRUNCATED, count=6)))
    policy, reference = make_model(dtype=torch.float64), make_model(seed=1, dtype=torch.float64)
    objective = resolve("dapo", {"regularizers": [{"name": "kl", "coefficient": 0.1}], "shaping": []})
    trainer = make_trainer(policy, 1.0, reference=reference, objective=objective)
    plain = without_sets(rows)
    whole, other = (np.array(at_drawn(rows, trainer.score(plain, who))) for who in ("policy", "reference"))
    assert at_drawn(rows, trainer.score(rows, "reference")) == other.tolist()
    kept = np.array(at_drawn(rows, trainer.score(rows, "policy")))
    assert (kept - whole).mean() > 0.05, "truncation leaves less than everything"
    untruncated = make_trainer(make_model(dtype=torch.float64), 1.0, reference=reference, objective=objective)
    found, expected = (t.step(Batch(updates=(tuple(r),))).metrics for t, r in ((trainer, rows), (untruncated, plain)))
    assert found["policy/ratio_max"] == 1.0
    assert found["policy/kl_ref_k1"] == pytest.approx((whole - other).mean(), rel=1e-9)
    for name in ("policy/kl_ref_k1", "policy/kl_ref_k3", "policy/kl_ref_sequence", "policy/entropy", "loss/kl"):
        assert found[name] == pytest.approx(expected[name], rel=1e-9), name


def test_the_pull_of_the_reference_is_that_of_whole_policies() -> None:
    """With the policy gradient taken away, a truncated step moves the weights as an untruncated one."""
    rows = credited(rows_from(completions(make_model(), TRUNCATED, count=6)))
    rows = [dataclasses.replace(row, advantages=[0.0] * len(row.advantages)) for row in rows]
    reference = make_model(seed=1, dtype=torch.float64)
    terms = [{"name": "kl", "coefficient": 0.1, "estimator": "k2"}, {"name": "entropy_bonus", "coefficient": 0.1}]
    objective = resolve("dapo", {"regularizers": terms, "shaping": []})
    moved = []
    for given in (rows, without_sets(rows)):
        trainer = make_trainer(make_model(dtype=torch.float64), 1.0, reference=reference, objective=objective)
        trainer.step(Batch(updates=(tuple(given),)))
        moved.append({name: tensor.clone() for name, tensor in trainer.publish().tensors.items()})
    start = dict(make_model(dtype=torch.float64).named_parameters())
    assert max((moved[0][name] - start[name]).abs().max().item() for name in start) > 1e-4
    for name, tensor in moved[0].items():
        torch.testing.assert_close(tensor, moved[1][name], rtol=1e-9, atol=1e-10)


def test_a_kl_in_the_reward_is_that_of_whole_policies_and_ratios_stay_within_the_sets() -> None:
    drawn = completions(make_model(), TRUNCATED, count=4)
    members = tuple(episode([completion], index) for index, completion in enumerate(drawn))
    groups = [Group(id="g", draw=0, task=Task(id="t", messages=()), trajectories=members)]
    asked = {}

    def score(rows: Sequence[Sample], who: str) -> list[list[float]]:
        asked[who] = [row.keep_ids for row in rows]
        return [[-0.5] * len(row.token_ids) for row in rows]

    rules = CreditRules(objective=resolve("rloo"), max_new_tokens=12)
    (rows,) = make_batch(groups, rules, score=score, version=0).updates
    assert asked["policy"] == [None] * 4
    assert all(row.proximal_logprobs is None and row.keep_ids is not None for row in rows)


def test_an_episode_of_several_turns_keeps_every_set_at_its_token() -> None:
    first = Completion(
        prompt_ids=(1, 2), token_ids=[5, 6], logprobs=[-0.1, -0.2], versions=[3, 3], finish=Finish.STOP,
        keep_ids=[[5, 9], [6]], top_ids=[[5], [6]], top_logprobs=[[-0.1], [-0.2]],
    )  # fmt: skip
    second = Completion(
        prompt_ids=(1, 2, 5, 6, 8), token_ids=[7], logprobs=[-0.3], versions=[4], finish=Finish.STOP,
        keep_ids=[[4, 7, 3]], top_ids=[[7]], top_logprobs=[[-0.3]],
    )  # fmt: skip
    (row,) = rows_of(episode([first, second]))
    assert row.token_ids == [1, 2, 5, 6, 8, 7]
    assert row.keep_ids == [[], [], [5, 9], [6], [], [4, 7, 3]]
    (microbatch,) = pack([row, dataclasses.replace(row, index=1)], 100)
    assert microbatch.keep_ids is not None
    assert microbatch.keep_counts is not None
    assert [ids.tolist() for ids in microbatch.keep_ids] == [[5, 9, 6, 4, 7, 3]] * 2
    assert microbatch.top_ids is not None
    assert microbatch.top_ids.tolist() == [[0], [0], [5], [6], [0], [7]] * 2
    assert microbatch.keep_counts.tolist() == [0, 0, 2, 1, 0, 3] * 2
    plain = dataclasses.replace(second, keep_ids=None)
    with pytest.raises(AssertionError, match="in one episode"):
        rows_of(episode([first, plain]))
    (other,) = rows_of(episode([dataclasses.replace(first, keep_ids=None)], index=1))
    with pytest.raises(AssertionError, match="either all rows"):
        pack([row, other], 100)


@pytest.mark.parametrize("keep_ids", [[[], [9], [6]], [[], [5], [6, 6]], [[4], [5], [6]]])
def test_keep_sets_without_the_drawn_token_or_where_nothing_was_drawn_are_refused(keep_ids: list[list[int]]) -> None:
    row = Sample(
        group_id="g", index=0, token_ids=[4, 5, 6], loss_mask=[0, 1, 1], behavior_logprobs=[0.0, -1.0, -1.0],
        versions=[-1, 0, 0], advantages=[0.0] * 3, weights=[0.0] * 3, keep_ids=[[], [5], [6]],
    )  # fmt: skip
    pack([row], 10)
    with pytest.raises(AssertionError, match="a keep-set holds the drawn token once"):
        pack([dataclasses.replace(row, keep_ids=keep_ids)], 10)


class OwnDefaults(FakeSampler):
    """Says what it applied; leaves out keep-sets, or gives some that nobody asked for."""

    def __init__(self, change: Callable[[Completion], Completion]) -> None:
        super().__init__(lambda request: [104, 0])
        self._change = change

    async def generate(self, request: Request) -> Completion:
        return self._change(await super().generate(request))


class OneLetter(Letters):
    """Whatever is asked or drawn."""

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        return (97,)

    def decode(self, ids: Sequence[int]) -> str:
        return "h"


class Always(FakeScorer):
    async def score(self, task: Task, trajectory: Trajectory) -> tuple[Score, Mapping[str, Score]]:
        return Score.of(1.0), {}


class OneStep:
    async def start(self, task: Task, seed: int) -> EnvOpening:
        return EnvOpening(messages=task.messages)

    async def step(self, message: Message) -> EnvReply:
        return EnvReply(messages=(), is_done=True)

    async def close(self) -> None:
        """Nothing to close."""


def play(change: Callable[[Completion], Completion], **params: Any) -> Trajectory:
    setup = EpisodeSetup(
        sampler=OwnDefaults(change),
        renderer=OneLetter(),
        scorer=Always(),
        make_env=lambda name: OneStep(),
        params=SamplingParams(max_new_tokens=4, stop_ids=(0,), **params),
        max_turns=1,
        episode_seconds=5.0,
        seed=0,
    )
    task = Task(id="t", messages=(Message(role="user", content="a"),))
    return asyncio.run(run_episode(setup, task, group_id="g", index=0, request_id="r"))


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 0.6), ("top_k", 20), ("top_p", 0.95), ("min_p", 0.05), ("max_new_tokens", 5), ("stop", ("x",))],
)
def test_a_sampler_with_defaults_of_its_own_stops_the_run_and_the_parameter_is_named(name: str, value: Any) -> None:
    def with_default(completion: Completion) -> Completion:
        assert completion.params is not None
        return dataclasses.replace(completion, params=dataclasses.replace(completion.params, **{name: value}))

    with pytest.raises(BackendError, match=f"request r/0 with {name}="):
        play(with_default)


def test_log_probabilities_of_the_wrong_kind_stop_the_run() -> None:
    kept = partial(dataclasses.replace, keep_ids=[[104], [0]])
    assert play(lambda completion: completion).status is Status.COMPLETED
    assert play(kept, top_k=1).status is Status.COMPLETED
    assert play(lambda completion: dataclasses.replace(completion, params=None)).status is Status.COMPLETED
    with pytest.raises(BackendError, match="without the tokens it kept: with top_k=1"):
        play(partial(dataclasses.replace, keep_ids=None), top_k=1)
    with pytest.raises(BackendError, match="although nothing was to be left out"):
        play(kept)
