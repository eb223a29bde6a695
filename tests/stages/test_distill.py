"""Distillation takes now samples, now texts, by seed and step alone; a resume agrees to the token; nothing is rewarded;
a teacher with another tokenizer is refused by name."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from temper.batching.rows import domain_of
from temper.batching.samples import CreditRules, make_batch
from temper.errors import UserError
from temper.models.tiny import make_tiny_model
from temper.objectives import Extent, resolve
from temper.objectives.losses.divergences import gkd, k2
from temper.objectives.presets.distillation import GKD, OFF_POLICY_DISTILLATION, OPD_DIRECT
from temper.protocols import BatchSource, EnvOpening, EnvReply
from temper.rollout.buffer import Buffer, StepGroups
from temper.rollout.episode import EpisodeSetup, run_episode
from temper.rollout.source import RolloutSettings, RolloutSource
from temper.stages.distill import (
    Mixture,
    NoReward,
    distill_source,
    share_of_samples,
    teacher_folders,
    trains_on_samples,
    unrewarded,
)
from temper.tasks.dataset import Stream
from temper.tasks.generators import make_source
from temper.types import (
    Batch,
    Completion,
    Finish,
    Message,
    Publication,
    Request,
    Sample,
    SamplingParams,
    Scalar,
    Status,
    Task,
)
from tests.fakes.episodes import Letters

WORDS = "word"


class OneTurn:
    """An environment that ends after one message; the word "fall" makes it fail."""

    async def start(self, task: Task, seed: int) -> EnvOpening:
        if task.messages[0].content.startswith("fall"):
            raise RuntimeError("fell")
        return EnvOpening(messages=task.messages)

    async def step(self, message: Message) -> EnvReply:
        return EnvReply(is_done=True)

    async def close(self) -> None: ...


class Echo:
    """A sampler whose text depends on the request alone; even requests are cut at the limit."""

    version = 0

    async def generate(self, request: Request) -> Completion:
        await asyncio.sleep(0)
        size = 1 + sum(map(ord, request.id)) % 4
        return Completion(
            prompt_ids=request.prompt_ids,
            token_ids=[7 + place for place in range(size)],
            logprobs=[-1.0] * size,
            versions=[self.version] * size,
            finish=Finish.LENGTH if size % 2 == 0 else Finish.STOP,
        )

    async def load(self, publication: Publication) -> None: ...


class Texts:
    """Given texts, one row per task, as an examples' source gives them."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    async def start(self) -> None: ...
    async def release(self, version: int) -> None: ...
    async def close(self) -> None: ...

    async def take(self, step: int) -> Batch:
        rows = []
        for _ in range(2):
            draw, task = self._stream.next()
            ids = [ord(c) for c in task.messages[0].content + str(task.answer)]
            mask = [0] + [1] * (len(ids) - 1)
            rows.append(
                Sample(group_id=f"{task.id}#{draw}", index=0, token_ids=ids, loss_mask=mask, versions=[-1] * len(ids),
                       behavior_logprobs=[0.0] * len(ids), advantages=[0.0] * len(ids), weights=[0.1] * len(ids))
            )  # fmt: skip
        return Batch(updates=(tuple(rows),), metrics={"data/examples": 2.0})

    def state(self) -> dict[str, Scalar | list[Scalar]]:
        return self._stream.state()

    def load_state(self, state: Mapping[str, Scalar | list[Scalar]]) -> None:
        self._stream.load_state(state)


class Counter:
    """The version of a trainer."""

    def __init__(self) -> None:
        self.version = 0


def no_scores(rows: Sequence[Sample], who: str) -> list[list[float]]:
    raise AssertionError("no pass is needed for credit")


def parts(counter: Counter) -> tuple[Texts, Callable[[], BatchSource]]:
    stream = Stream([make_source("spell_backward", {}, seed=1, size=9)], [1.0], seed=0)
    sampler: Any = Echo()
    rules = CreditRules(objective=GKD, max_new_tokens=4)

    def credit(taken: StepGroups) -> Batch:
        return make_batch(taken.groups, rules, score=no_scores, version=counter.version, dropped=taken.dropped)

    def roller() -> BatchSource:
        sampler.version = counter.version
        setup = EpisodeSetup(
            sampler=sampler, renderer=Letters(), scorer=NoReward(), make_env=lambda name: OneTurn(), max_turns=1,  # type: ignore[arg-type, return-value]
            params=SamplingParams(max_new_tokens=4), episode_seconds=5.0, seed=0,
        )  # fmt: skip
        buffer = Buffer(groups_per_step=2, max_staleness=0, max_rounds=2, version=counter.version)
        settings = RolloutSettings(
            group_size=2, min_members=1, drop_degenerate=False, error_limit=0.0, step_seconds=5.0, prefix="stage 0"
        )
        return RolloutSource(setup, stream, buffer, settings, unrewarded(credit))

    return Texts(stream), roller


def make_mixture(counter: Counter, lmbda: float = 0.5) -> Mixture:
    texts, roller = parts(counter)
    return Mixture(texts, roller, lmbda=lmbda, seed=3)


def play(source: Mixture, counter: Counter, steps: range) -> list[Batch]:
    async def run() -> list[Batch]:
        batches = []
        await source.start()
        for step in steps:
            batches.append(await source.take(step))
            counter.version = step
            await source.release(counter.version)
        await source.close()
        return batches

    return asyncio.run(run())


def content(batches: Sequence[Batch]) -> list[Any]:
    return [
        ([(row.group_id, row.index, row.token_ids, row.weights) for update in batch.updates for row in update],
         dict(batch.metrics)) for batch in batches
    ]  # fmt: skip


def test_the_choice_is_a_function_of_seed_and_step_with_the_given_share() -> None:
    chosen = [trains_on_samples(0, step, 0.3) for step in range(4000)]
    assert chosen == [trains_on_samples(0, step, 0.3) for step in range(4000)]
    assert sum(chosen) / 4000 == pytest.approx(0.3, abs=0.03)
    assert chosen != [trains_on_samples(1, step, 0.3) for step in range(4000)]
    assert all(trains_on_samples(0, step, 1.0) for step in range(100))
    assert not any(trains_on_samples(0, step, 0.0) for step in range(100))
    # A larger share keeps every step that a smaller one trains on samples.
    assert all(trains_on_samples(0, step, 0.6) for step in range(4000) if chosen[step])


def test_steps_take_samples_or_texts_as_chosen_and_share_one_stream() -> None:
    counter = Counter()
    batches = play(make_mixture(counter), counter, range(1, 13))
    is_sampled = [batch.metrics["distillation/on_policy"] == 1.0 for batch in batches]
    assert is_sampled == [trains_on_samples(3, step, 0.5) for step in range(1, 13)]
    assert {True, False} == set(is_sampled)
    names = [sorted({row.group_id for row in batch.updates[0]}) for batch in batches]
    assert sum(map(len, names)) == len({name for group in names for name in group}) == 24
    # Nine tasks: a roller that forgot the ones before it would find every prompt new.
    assert max(batch.metrics.get("data/prompt_repeat_rate", 0.0) for batch in batches) > 0
    for batch, sampled in zip(batches, is_sampled, strict=True):
        assert bool(batch.groups) == sampled
        assert not any(name.startswith(("reward/", "data/all_")) for name in batch.metrics)


@pytest.mark.parametrize("cut", [1, 3, 4, 7])
def test_a_resumed_mixture_goes_on_with_the_same_batches(cut: int) -> None:
    counter = Counter()
    whole = content(play(make_mixture(counter), counter, range(1, 11)))
    counter = Counter()
    first = make_mixture(counter)
    begun = content(play(first, counter, range(1, cut + 1)))
    state = first.state()
    later = Counter()
    later.version = cut
    second = make_mixture(later)
    second.load_state(state)
    assert begun + content(play(second, later, range(cut + 1, 11))) == whole
    # Planted fault: without the state the stream would begin anew.
    forgetful = Counter()
    forgetful.version = cut
    assert begun + content(play(make_mixture(forgetful), forgetful, range(cut + 1, 11))) != whole


def test_samples_are_drawn_by_the_weights_of_their_step() -> None:
    """A roller that lasted through steps on texts would hand out samples of older weights, or refuse them."""
    counter = Counter()
    batches = play(make_mixture(counter), counter, range(1, 13))
    for step, batch in enumerate(batches, start=1):
        if batch.groups:
            versions = {v for row in batch.updates[0] for v, m in zip(row.versions, row.loss_mask, strict=True) if m}
            assert versions == {step - 1}
            assert len(batch.groups) == 2  # no burst after steps that the roller did not feed


def test_all_tokens_of_a_sampled_batch_weigh_the_same_cut_ones_too() -> None:
    counter = Counter()
    (batch,) = play(make_mixture(counter, lmbda=1.0), counter, range(1, 2))
    weights = [w for row in batch.updates[0] for w, m in zip(row.weights, row.loss_mask, strict=True) if m]
    assert weights == pytest.approx([1 / len(weights)] * len(weights))
    members = [member for group in batch.groups for member in group.trajectories]
    assert {Status.TRUNCATED_LENGTH, Status.COMPLETED} == {member.status for member in members}
    assert {(row.group_id, row.index) for row in batch.updates[0]} == {(m.group_id, m.index) for m in members}
    assert all(row.teacher == "spell_backward" for row in batch.updates[0])


def test_a_failed_episode_is_never_trained() -> None:
    setup = EpisodeSetup(
        sampler=Echo(), renderer=Letters(), scorer=NoReward(), make_env=lambda name: OneTurn(), max_turns=1,  # type: ignore[arg-type]
        params=SamplingParams(max_new_tokens=4), episode_seconds=5.0, seed=0,
    )  # fmt: skip
    task = Task(id="t", messages=(Message(role="user", content="fall"),))
    failed = asyncio.run(run_episode(setup, task, group_id="g", index=0, request_id="r"))
    assert failed.status is Status.TOOL_ERROR
    assert not failed.is_trainable
    stands = dataclasses.replace(task, messages=(Message(role="user", content="stand"),))
    assert asyncio.run(run_episode(setup, stands, group_id="g", index=0, request_id="r")).is_trainable


def test_the_source_follows_lmbda() -> None:
    texts, roller = parts(Counter())
    make = partial(distill_source, seed=0, examples=lambda: texts, roller=roller, max_staleness=0)
    assert make(OFF_POLICY_DISTILLATION) is texts
    assert isinstance(make(OPD_DIRECT), RolloutSource)
    assert isinstance(make(GKD), Mixture)
    assert share_of_samples(resolve("opd")) == 1.0
    assert share_of_samples(dataclasses.replace(GKD, loss=gkd(lmbda=0.2))) == 0.2
    assert share_of_samples(dataclasses.replace(GKD, loss=k2())) == 1.0
    with pytest.raises(UserError, match=r"max_staleness=2 with lmbda=0.5"):
        make(GKD, max_staleness=2)
    assert isinstance(make(OPD_DIRECT, max_staleness=2), RolloutSource)


def test_gkd_weighs_by_tokens_of_the_whole_batch() -> None:
    extent = Extent(lengths=torch.tensor([3, 1]), group_ids=torch.tensor([0, 1]), max_new_tokens=4)
    assert GKD.weighting(extent).tolist() == [0.25, 0.25]


def test_a_teacher_with_another_tokenizer_is_refused_and_both_are_named(tmp_path: Path) -> None:
    shape = {"layers": 1, "width": 8, "heads": 1, "kv_heads": 1, "mlp_width": 8, "context": 16, "seed": 0}
    folders = {
        name: make_tiny_model(tmp_path / name, alphabet=alphabet, **shape)  # type: ignore[arg-type]
        for name, alphabet in (("student", "abc"), ("same", "abc"), ("other", "acb"))
    }
    taught_by = {"math": str(folders["same"]), "code": str(folders["other"])}
    with pytest.raises(UserError, match=r"other cannot teach .*student: their tokenizers differ"):
        teacher_folders(folders["student"], taught_by)
    found = teacher_folders(folders["student"], {"math": str(folders["same"])})
    assert found == {"math": folders["same"]}
    with pytest.raises(UserError, match="not a directory"):
        teacher_folders(folders["student"], {"": str(tmp_path / "nowhere")})


@pytest.mark.parametrize(
    ("id_", "extra", "domain"),
    [
        ("math.jsonl:17", {}, "math"),
        ("math.jsonl:17", {"domain": "code"}, "code"),
        ("spell_backward:1:3", {}, "spell_backward"),
    ],
)
def test_the_domain_of_a_task_is_its_field_or_its_source(id_: str, extra: dict[str, Scalar], domain: str) -> None:
    assert domain_of(Task(id=id_, messages=(), extra=extra)) == domain
