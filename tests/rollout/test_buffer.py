"""The staleness bound holds on every schedule, and no prompt is favoured."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from temper.errors import BackendError
from temper.rollout.buffer import Buffer, StepGroups
from temper.types import Completion, Finish, Group, Message, Score, Status, Task, Trajectory, Turn


def group(draw: int, version: int) -> Group:
    task = Task(id=f"t{draw}", messages=(Message(role="user", content="?"),))
    completion = Completion(prompt_ids=(1,), token_ids=[2], logprobs=[0.0], versions=[version], finish=Finish.STOP)
    turn = Turn(completion=completion, message=Message(role="assistant", content="!"))
    members = tuple(
        Trajectory(
            task_id=task.id, group_id=f"g{draw}", index=k, turns=(turn,), status=Status.COMPLETED, score=Score.of(k)
        )
        for k in range(2)
    )
    return Group(id=f"g{draw}", draw=draw, task=task, trajectories=members)


@dataclass
class Simulation:
    """Groups finish after random waits; the trainer takes, trains for a while, releases."""

    seed: int
    staleness: int
    groups_per_step: int
    drop_share: float
    steps: int = 12
    order: Any = "draw"
    stubborn: int = 0
    """Every so-manieth draw finishes only when nothing else can happen; 0: none."""
    trained: list[StepGroups] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    most_admitted_at_version: dict[int, int] = field(default_factory=dict)

    async def run(self) -> None:
        random_ = random.Random(self.seed)
        buffer = Buffer(
            groups_per_step=self.groups_per_step, max_staleness=self.staleness, max_rounds=1000, order=self.order
        )
        version, running, next_draw, training = 0, {}, 0, None
        while len(self.trained) < self.steps or training is not None:
            for _ in range(max(0, buffer.room)):
                await buffer.start(next_draw)
                running[next_draw] = version
                next_draw += 1
            can_train = training is not None or (len(self.trained) < self.steps and buffer.is_ready)
            quick = [draw for draw in running if not self.stubborn or draw % self.stubborn]
            choices = [*quick, *(["train"] if can_train else [])] or [*running]
            choice = random_.choice(choices)
            if choice != "train":
                reason = "degenerate" if random_.random() < self.drop_share else None
                await buffer.finish(group(choice, running.pop(choice)), reason)
            elif training is not None:
                version += 1
                training = None
                await buffer.release(version)
            else:
                taken = await buffer.take(1.0)
                self.ages += [version - g.oldest_version for g in taken.groups]
                self.trained.append(taken)
                training = version


@settings(max_examples=300)
@given(st.integers(0, 10**6), st.integers(0, 4), st.integers(1, 5), st.sampled_from([0.0, 0.3, 0.7]))
def test_no_trained_group_is_older_than_the_bound_and_order_is_draw_order(
    seed: int, staleness: int, groups_per_step: int, drop_share: float
) -> None:
    simulation = Simulation(seed=seed, staleness=staleness, groups_per_step=groups_per_step, drop_share=drop_share)
    asyncio.run(simulation.run())
    assert max(simulation.ages) <= staleness
    draws = [g.draw for taken in simulation.trained for g in taken.groups]
    assert draws == sorted(draws)
    seen = sorted(draws + [g.draw for taken in simulation.trained for g, _ in taken.dropped])
    assert seen == list(range(len(seen))), "every draw is trained or dropped, exactly once, none overtaken"


def test_asynchrony_really_happens_within_the_bound() -> None:
    simulation = Simulation(seed=1, staleness=3, groups_per_step=2, drop_share=0.0, steps=200)
    asyncio.run(simulation.run())
    assert max(simulation.ages) == 3, "the bound must be reached, or the simulation proves nothing"


def test_admission_follows_the_worked_example() -> None:
    # Worked numbers: staleness 2, four groups a step, version 3, 18 accepted, 3 running -> room for 3.
    async def run() -> int:
        buffer = Buffer(groups_per_step=4, max_staleness=2, max_rounds=10, version=3)
        buffer._num_accepted = 18
        for draw in range(3):
            await buffer.start(draw)
        return buffer.room

    assert asyncio.run(run()) == 3


def test_a_restart_does_not_admit_a_burst() -> None:
    assert Buffer(groups_per_step=4, max_staleness=1, max_rounds=10, version=7).room == 8


def test_a_slot_is_free_only_after_release() -> None:
    async def run() -> tuple[int, int]:
        buffer = Buffer(groups_per_step=1, max_staleness=0, max_rounds=10)
        await buffer.start(0)
        await buffer.finish(group(0, 0), None)
        await buffer.take(1.0)
        before = buffer.room
        await buffer.release(1)
        return before, buffer.room

    assert asyncio.run(run()) == (0, 1)


def test_synchronous_refills_start_together() -> None:
    async def run() -> list[int]:
        buffer = Buffer(groups_per_step=3, max_staleness=0, max_rounds=10)
        for draw in range(3):
            await buffer.start(draw)
        rooms = []
        for draw in range(3):
            await buffer.finish(group(draw, 0), "degenerate" if draw < 2 else None)
            rooms.append(buffer.room)
        return rooms

    assert asyncio.run(run()) == [0, 0, 2]


def test_a_stale_group_is_caught_at_consumption_too() -> None:
    async def run() -> None:
        buffer = Buffer(groups_per_step=1, max_staleness=1, max_rounds=10, version=5)
        await buffer.start(0)
        await buffer.finish(group(0, version=3), None)
        await buffer.take(1.0)

    with pytest.raises(BackendError, match="2 versions old"):
        asyncio.run(run())


def test_nothing_but_degenerate_groups_ends_with_the_reasons() -> None:
    async def run() -> None:
        buffer = Buffer(groups_per_step=2, max_staleness=0, max_rounds=2)
        for draw in range(5):
            await buffer.start(draw)
            await buffer.finish(group(draw, 0), "degenerate")
        await buffer.take(1.0)

    with pytest.raises(BackendError, match="5 degenerate"):
        asyncio.run(run())


def test_waiting_has_a_deadline_that_says_what_is_missing() -> None:
    async def run() -> None:
        buffer = Buffer(groups_per_step=1, max_staleness=0, max_rounds=2)
        await buffer.start(0)
        await buffer.take(0.05)

    with pytest.raises(BackendError, match="1 groups running"):
        asyncio.run(run())


def test_drops_of_later_steps_do_not_end_a_run_whose_first_draw_is_slow() -> None:
    """Every second group is degenerate and the first draw takes longest: a healthy run, at any staleness."""

    async def run(staleness: int) -> int:
        buffer = Buffer(groups_per_step=8, max_staleness=staleness, max_rounds=2)
        await buffer.start(0)
        draw = 1
        while buffer.room > 0:
            await buffer.start(draw)
            await buffer.finish(group(draw, 0), "degenerate" if draw % 2 else None)
            draw += 1
        waiting = asyncio.ensure_future(buffer.take(5.0))
        await asyncio.sleep(0)
        await buffer.finish(group(0, 0), None)
        return len((await waiting).groups)

    assert asyncio.run(run(8)) == 8


def test_drops_behind_a_slow_draw_are_bounded() -> None:
    async def run() -> tuple[int, int]:
        buffer = Buffer(groups_per_step=2, max_staleness=4, max_rounds=3)
        await buffer.start(0)
        draw = 1
        while buffer.room > 0:
            await buffer.start(draw)
            await buffer.finish(group(draw, 0), "degenerate")
            draw += 1
        await buffer.finish(group(0, 0), None)
        return draw - 1, buffer.room

    dropped, room = asyncio.run(run())
    assert dropped == 7, "one more than three rounds of two"
    assert room > 0, "once the slow draw is settled, others may start"


def count_lines(function: Callable[[], object]) -> int:
    """How many lines of the buffer are executed."""
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.endswith(("rollout/buffer.py", "rollout/orders.py")):
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return lines


def lines_per_group(groups_per_step: int, staleness: int, order: Any = "draw") -> float:
    async def run() -> int:
        buffer, draw, running = (
            Buffer(groups_per_step=groups_per_step, max_staleness=staleness, max_rounds=10, order=order),
            0,
            [],
        )
        for version in range(1, 4):
            while buffer.room > 0:
                await buffer.start(draw)
                running.append((draw, version - 1))
                draw += 1
            for number, drawn_by in reversed(running):  # the first comes last
                assert buffer.room <= 0
                await buffer.finish(group(number, drawn_by), None)
            running.clear()
            await buffer.take(1.0)
            await buffer.release(version)
        return draw

    draws: list[int] = []
    lines = count_lines(lambda: draws.append(asyncio.run(run())))
    return lines / draws[0]


def test_a_group_costs_the_same_however_many_others_wait() -> None:
    assert lines_per_group(64, 4) <= 1.1 * lines_per_group(8, 4)


def test_a_member_that_drew_nothing_does_not_make_its_group_old() -> None:
    """One aborted before its first token has a turn and no token: it has no age, and must not end the run."""
    whole = group(0, version=5)
    empty = replace(whole.trajectories[0].turns[0].completion, token_ids=[], logprobs=[], versions=[])
    turn = replace(whole.trajectories[0].turns[0], completion=empty)
    aborted = replace(whole.trajectories[0], turns=(turn,), status=Status.ABORTED, score=Score.error("aborted"))
    mixed = replace(whole, trajectories=(aborted, *whole.trajectories))
    assert mixed.oldest_version == 5

    async def go() -> StepGroups:
        buffer = Buffer(groups_per_step=1, max_staleness=0, max_rounds=1, version=5)
        await buffer.start(0)
        await buffer.finish(mixed, None)
        return await buffer.take(1.0)

    assert asyncio.run(go()).groups == (mixed,)
    assert replace(whole, trajectories=(aborted,)).oldest_version == -1
