"""Choosers under a roller: what a step consumes is remembered, dropped groups too, and a resume loses nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from temper.envs.env import make_env
from temper.rollout.buffer import Buffer
from temper.rollout.episode import EpisodeSetup
from temper.rollout.source import RolloutSettings, RolloutSource
from temper.tasks.choice.chooser import StageFacts
from temper.tasks.choice.memory import PromptMemory
from temper.tasks.choice.registry import read_choosers
from temper.tasks.choice.stream import ChosenStream
from temper.tasks.dataset import Stream
from temper.types import Batch, Publication, Request, SamplingParams, Score, Task, Trajectory
from tests.fakes.episodes import FakeScorer, Letters
from tests.fakes.prompts import make_tasks
from tests.fakes.sampler import FakeSampler

TASKS = make_tasks("t", 10)
CHOOSE: list[Any] = ["band", {"name": "no_positive_resampling", "threshold": 0.8}]


class Judge(FakeScorer):
    """Passes answers by chance that the prompt's number and the group's draw decide: t:0 never, t:9 always."""

    async def score(self, task: Task, trajectory: Trajectory) -> tuple[Score, dict[str, Score]]:
        chance = random.Random(f"{trajectory.group_id}/{trajectory.index}").random()
        score = Score.of(float(chance < int(task.id.partition(":")[2]) / 9))
        return score, {"judge": score}


async def jitter(request: Request) -> None:
    await asyncio.sleep(random.Random(request.id).random() * 0.003)


def make_roller(sampler: FakeSampler, staleness: int, choose: Sequence[Any], version: int = 0) -> RolloutSource:
    setup = EpisodeSetup(
        sampler=sampler, renderer=Letters(), scorer=Judge(), make_env=make_env,
        params=SamplingParams(max_new_tokens=4, stop_ids=(1,)), max_turns=1, episode_seconds=5.0, seed=0,
    )  # fmt: skip
    memory = PromptMemory(read_choosers(choose), StageFacts(sources=("t",), weights=(1.0,), steps=9))
    stream: Any = Stream([TASKS], [1.0], seed=0)
    buffer = Buffer(groups_per_step=3, max_staleness=staleness, max_rounds=10, version=version)
    settings = RolloutSettings(
        group_size=4, min_members=2, drop_degenerate=True, error_limit=0.2, step_seconds=5.0, prefix="stage 0"
    )
    chosen = ChosenStream(stream, memory) if choose else stream
    return RolloutSource(
        setup, chosen, buffer, settings, lambda taken: Batch(updates=(), groups=taken.groups), memory=memory
    )


async def run_steps(roller: RolloutSource, sampler: FakeSampler, steps: Sequence[int]) -> tuple[list[Batch], Any]:
    """The batches of these steps, and the state after the last, as a checkpoint would hold it."""
    await roller.start()
    batches = []
    try:
        for step in steps:
            batches.append(await roller.take(step))
            state = roller.state()
            await sampler.load(Publication(version=step, tensors={}))
            await roller.release(step)
    finally:
        await roller.close()
    return batches, state


def consumed(batches: Sequence[Batch]) -> list[tuple[int, str]]:
    every = [(*batch.groups, *(group for group, _ in batch.dropped)) for batch in batches]
    return [(group.draw, group.task.id) for groups in every for group in sorted(groups, key=lambda one: one.draw)]


def test_trained_and_dropped_groups_are_both_remembered() -> None:
    sampler = FakeSampler(lambda request: [120, 1], delay=jitter)
    batches, _ = asyncio.run(run_steps(make_roller(sampler, 0, []), sampler, range(1, 7)))
    assert any(batch.dropped for batch in batches), "or nothing is shown"
    draws: dict[str, int] = {}
    for step, batch in enumerate(batches, start=1):
        names = [name for _, name in consumed([batch])]
        for name in names:
            draws[name] = draws.get(name, 0) + 1
        assert {history.task_id: history.draws for history in batch.histories} == {name: draws[name] for name in names}
        assert {history.last_step for history in batch.histories} == {step}
        assert batch.metrics["data/prompts_known"] == len(draws)


def test_a_band_makes_a_roller_roll_less_in_vain() -> None:
    runs = []
    for choose in ([], ["band"]):
        sampler = FakeSampler(lambda request: [120, 1], delay=jitter)
        batches, _ = asyncio.run(run_steps(make_roller(sampler, 0, choose), sampler, range(1, 17)))
        runs.append(batches)
    plain, chosen = (sum(len(batch.dropped) for batch in batches[4:]) for batches in runs)
    assert chosen < plain
    assert all("data/skipped_share" in batch.metrics for batch in runs[1])


@pytest.mark.parametrize("broken", [2, 5, 7])
def test_a_synchronous_roller_that_is_resumed_draws_what_the_unbroken_one_draws(broken: int) -> None:
    sampler = FakeSampler(lambda request: [120, 1], delay=jitter)
    straight, last = asyncio.run(run_steps(make_roller(sampler, 0, CHOOSE), sampler, range(1, 9)))
    sampler = FakeSampler(lambda request: [120, 1], delay=jitter)
    before, state = asyncio.run(run_steps(make_roller(sampler, 0, CHOOSE), sampler, range(1, broken + 1)))
    resumed = make_roller(sampler, 0, CHOOSE, version=broken)
    resumed.load_state(state)
    after, state = asyncio.run(run_steps(resumed, sampler, range(broken + 1, 9)))
    assert consumed(before) + consumed(after) == consumed(straight)
    assert state == last
    metrics = [dict(batch.metrics) for batch in (*before, *after)]
    assert metrics == [dict(batch.metrics) for batch in straight]


def test_a_roller_that_runs_ahead_goes_on_with_the_prompts_that_were_under_way() -> None:
    async def interrupted() -> tuple[list[Batch], list[Batch], list[str]]:
        sampler = FakeSampler(lambda request: [120, 1], delay=jitter)
        first = make_roller(sampler, 2, CHOOSE)
        before, _ = await run_steps(first, sampler, range(1, 5))
        state = first.state()  # after the last release: draws are under way
        under_way = [str(line) for line in state["chosen draws"]]
        second = make_roller(sampler, 2, CHOOSE, version=4)
        second.load_state(state)
        after, _ = await run_steps(second, sampler, range(5, 9))
        return before, after, under_way

    before, after, under_way = asyncio.run(interrupted())
    assert under_way, "or nothing is shown"
    draws = [draw for draw, _ in consumed([*before, *after])]
    assert sorted(draws) == list(range(len(draws))), "each draw is consumed once"
    later = dict(consumed(after))
    for line in under_way:
        draw, _, index, *_ = line.strip("[]").replace("]", "").split(", ")
        assert later[int(draw)] == f"t:{index}"
