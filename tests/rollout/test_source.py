"""The roller feeds, drops, refills and stops, at any staleness."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence

import pytest

from temper.envs.env import make_env
from temper.errors import BackendError, ContextFull
from temper.rollout.buffer import Buffer
from temper.rollout.episode import EpisodeSetup
from temper.rollout.group import Extras
from temper.rollout.source import RolloutSettings, RolloutSource
from temper.rollout.steps import StepSplit
from temper.tasks.dataset import Stream
from temper.tasks.generators import make_source
from temper.types import Batch, Message, Publication, Request, SamplingParams, Score, Status, Task, Trajectory
from tests.fakes.episodes import FakeScorer
from tests.fakes.sampler import FakeSampler


class Words:
    def prompt_messages(self, task: Task) -> tuple[Message, ...]:
        return task.messages

    def prompt_ids(self, messages: Sequence[Message], tools=()) -> tuple[int, ...]:
        return tuple(ord(c) for c in messages[-1].content)

    def extend_ids(self, *_: object, tools=()) -> tuple[int, ...]:
        raise AssertionError("one turn only")

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


class Judge(FakeScorer):
    def __init__(self, verdict: Callable[[Task, int], Score]) -> None:
        self._verdict = verdict

    async def score(self, task: Task, trajectory: Trajectory) -> tuple[Score, Mapping[str, Score]]:
        score = self._verdict(task, trajectory.index)
        return score, {"judge": score}


def is_hopeless(task: Task) -> bool:
    return task.messages[0].content[0] in "abcdefg"


def varied(task: Task, index: int) -> Score:
    return Score.of(0.0 if is_hopeless(task) else float(index % 2))


async def jitter(request: Request) -> None:
    await asyncio.sleep(random.Random(request.id).random() * 0.004)


def make_roller(
    sampler: FakeSampler,
    verdict: Callable[[Task, int], Score],
    staleness: int,
    drop: bool,
    *,
    greedy: bool = False,
    steps: StepSplit | None = None,
) -> RolloutSource:
    setup = EpisodeSetup(
        sampler=sampler, renderer=Words(), scorer=Judge(verdict), make_env=make_env,
        params=SamplingParams(max_new_tokens=4, stop_ids=(1,)), max_turns=1, episode_seconds=5.0, seed=0,
    )  # fmt: skip
    stream = Stream([make_source("spell_backward", {}, seed=1, size=0)], [1.0], seed=0)
    buffer = Buffer(groups_per_step=4, max_staleness=staleness, max_rounds=10)
    settings = RolloutSettings(
        group_size=2, min_members=2, drop_degenerate=drop, error_limit=0.2, step_seconds=5.0, prefix="stage 0",
        extras=Extras(greedy=greedy, steps=steps),
    )  # fmt: skip
    return RolloutSource(setup, stream, buffer, settings, lambda taken: Batch(updates=(), groups=taken.groups))


async def run_steps(roller: RolloutSource, sampler: FakeSampler, steps: int) -> list[Batch]:
    await roller.start()
    batches = []
    try:
        for step in range(1, steps + 1):
            batches.append(await roller.take(step))
            await sampler.load(Publication(version=step, tensors={}))
            await roller.release(step)
    finally:
        await roller.close()
    return batches


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("drop", [False, True])
def test_steps_are_full_fresh_enough_and_in_draw_order(staleness: int, drop: bool) -> None:
    sampler = FakeSampler(lambda request: [120, 1], delay=jitter)
    roller = make_roller(sampler, varied, staleness, drop)
    batches = asyncio.run(run_steps(roller, sampler, 8))
    for step, batch in enumerate(batches):
        assert len(batch.groups) == 4
        assert max(step - group.oldest_version for group in batch.groups) <= staleness
        assert all(not group.is_degenerate for group in batch.groups) or not drop
    draws = [group.draw for batch in batches for group in batch.groups]
    assert draws == sorted(draws)
    assert drop == any(reason == "degenerate" for batch in batches for _, reason in batch.dropped)


def test_what_is_trained_does_not_depend_on_who_finishes_first() -> None:
    slow, fast = (FakeSampler(lambda request: [120, 1], delay=d) for d in (jitter, FakeSampler(lambda r: [])._delay))
    runs = [asyncio.run(run_steps(make_roller(s, varied, 2, True), s, 6)) for s in (slow, fast)]
    ids = [[group.id for batch in batches for group in batch.groups] for batches in runs]
    assert ids[0] == ids[1]


@pytest.mark.parametrize("is_released", [False, True], ids=["before the release", "after it"])
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_resumed_roller_trains_the_groups_that_were_not_trained_yet(staleness: int, is_released: bool) -> None:
    async def interrupted() -> tuple[list[str], list[str]]:
        sampler = FakeSampler(lambda request: [120, 1], delay=jitter)
        first = make_roller(sampler, varied, staleness, True)
        await first.start()
        seen = []
        for step in range(1, 4):
            batch = await first.take(step)
            seen += [group.id for group in batch.groups]
            state = first.state()
            await sampler.load(Publication(version=step, tensors={}))
            await first.release(step)
            if is_released:  # as a source that runs ahead is saved
                await asyncio.sleep(0.01)
                state = first.state()
        await first.close()
        second = make_roller(sampler, varied, staleness, True)
        second.load_state(state)
        await second.start()
        resumed = [group.id for group in (await second.take(4)).groups]
        await second.close()
        return seen, resumed

    sampler = FakeSampler(lambda request: [120, 1], delay=jitter)
    straight = asyncio.run(run_steps(make_roller(sampler, varied, staleness, True), sampler, 4))
    seen, resumed = asyncio.run(interrupted())
    assert seen + resumed == [group.id for batch in straight for group in batch.groups]


def test_a_broken_verifier_stops_the_run_and_is_named() -> None:
    def half_broken(task: Task, index: int) -> Score:
        return Score.error("judge answered 500") if index else Score.of(1.0)

    sampler = FakeSampler(lambda request: [120, 1])
    roller = make_roller(sampler, half_broken, 0, False)
    with pytest.raises(BackendError, match="too few scored members: judge answered 500"):
        asyncio.run(run_steps(roller, sampler, 2))


def test_a_broken_sampler_ends_the_wait_at_once() -> None:
    async def broken(request: Request) -> None:
        raise BackendError("the engine failed: out of memory")

    sampler = FakeSampler(lambda request: [1], delay=broken)
    with pytest.raises(BackendError, match="out of memory"):
        asyncio.run(run_steps(make_roller(sampler, varied, 0, False), sampler, 1))


def test_baselines_and_step_values_reach_the_batch() -> None:
    sampler = FakeSampler(lambda request: [120, 1])
    roller = make_roller(sampler, varied, 0, False, greedy=True, steps=StepSplit(samples=3))
    (batch,) = asyncio.run(run_steps(roller, sampler, 1))
    for group in batch.groups:
        assert group.greedy is not None
        assert all((t.step_starts, t.step_values) == ((0,), (t.score.value,)) for t in group.trajectories)


def test_baselines_that_cannot_be_scored_drop_their_groups_and_count_as_failures() -> None:
    def broken_for(letters: str) -> Callable[[Task, int], Score]:
        def verdict(task: Task, index: int) -> Score:
            is_broken = index == -1 and task.messages[0].content[0] in letters
            return Score.error("judge answered 500") if is_broken else Score.of(float(index))

        return verdict

    sampler = FakeSampler(lambda request: [120, 1])
    batches = asyncio.run(run_steps(make_roller(sampler, broken_for("abcdefg"), 0, False, greedy=True), sampler, 4))
    reasons = {reason for batch in batches for _, reason in batch.dropped}
    assert reasons == {"the greedy baseline could not be scored: judge answered 500"}
    assert all(group.greedy is not None and group.greedy.score.is_value for batch in batches for group in batch.groups)
    # Broken for most tasks: a quarter of all attempts and more, while every single member is scored.
    roller = make_roller(sampler, broken_for("abcdefghijklmnopqrstuvw"), 0, False, greedy=True)
    with pytest.raises(BackendError, match=r"episodes failed, more than .* judge answered 500"):
        asyncio.run(run_steps(roller, sampler, 4))


def test_a_broken_sampler_under_step_values_is_named_as_such() -> None:
    async def broken(request: Request) -> None:
        if "/step " in request.id:
            raise BackendError("the engine failed: out of memory")

    sampler = FakeSampler(lambda request: [120, 1], delay=broken)
    with pytest.raises(BackendError, match="out of memory"):
        asyncio.run(run_steps(make_roller(sampler, varied, 0, False, steps=StepSplit()), sampler, 1))


def test_tasks_that_are_too_long_are_dropped_with_the_reason_and_are_no_failures() -> None:
    asked: list[str] = []

    def script(request: Request) -> list[int]:
        asked.append(request.id)
        if chr(request.prompt_ids[0]) in "abcdefghijkl":  # about half of all tasks, far above the limit for errors
            raise ContextFull("the prompt has 40 tokens and the longest sequence is 32: no room to answer")
        return [120, 1]

    sampler = FakeSampler(script)
    roller = make_roller(sampler, lambda task, index: Score.of(float(index)), 0, False)
    roller._settings = dataclasses.replace(roller._settings, extras=Extras(retries=3))
    batches = asyncio.run(run_steps(roller, sampler, 4))
    assert all(len(batch.groups) == 4 for batch in batches)
    dropped = [(group, reason) for batch in batches for group, reason in batch.dropped]
    assert len(dropped) > 4
    for group, reason in dropped:
        assert reason.startswith("too few scored members: too_long: ")
        assert f"task {group.task.id}: the prompt has 40 tokens and the longest sequence is 32" in reason
        assert {member.status for member in group.trajectories} == {Status.TOO_LONG}
    assert not any("retry" in request for request in asked), "it would be as long again"
