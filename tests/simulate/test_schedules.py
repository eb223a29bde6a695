"""The bound, exactly-once and progress, on thousands of random schedules with drops, crashes and resumes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from temper.errors import BackendError
from temper.rollout.buffer import Buffer, StepGroups
from temper.rollout.source import RolloutSource
from temper.simulate.clock import Deadlock
from temper.types import Batch, Group, Scalar
from tests.fakes.promises import live_and_check
from tests.fakes.schedules import Parts, Schedule, draw_schedule, live_through

ORDERS = ("draw", "finished")
"""Values of rollout.order that schedules are drawn with."""


def drawn(seeds: range) -> Iterator[Schedule]:
    return (draw_schedule(seed, ORDERS) for seed in seeds)


def test_every_schedule_keeps_the_bound_and_trains_every_prompt_once() -> None:
    assert live_and_check(drawn(range(150))) > 45, "schedules without crashes prove little"


@pytest.mark.heavy
@pytest.mark.parametrize("part", range(4))
def test_ten_thousand_schedules_keep_the_bound_and_train_every_prompt_once(part: int) -> None:
    assert live_and_check(drawn(range(1000 + 2500 * part, 3500 + 2500 * part))) > 1000


def test_schedules_reach_the_bound_and_resume_from_every_kind_of_checkpoint() -> None:
    """Or they would prove nothing: ages of S, steps with drops, crashes before the first and after a later one."""
    reached, resumed, dropped = set[int](), 0, 0
    for seed in range(60):
        schedule = draw_schedule(seed, ORDERS)
        history = live_through(schedule)
        oldest = max(age for step in history.steps.values() for age in step.ages)
        if oldest == schedule.staleness:
            reached.add(schedule.staleness)
        resumed += history.resumes
        dropped += sum(len(step.dropped) for step in history.steps.values())
    assert reached >= {0, 1, 2}
    assert resumed > 20
    assert dropped > 20


class AdmitsTooMany(Buffer):
    """One step's groups more than the bound allows, and nobody looks when they are consumed."""

    @property
    def room(self) -> int:
        found = super().room
        return found + self._groups_per_step if self.max_staleness else found

    def _check_age(self, groups: tuple[Group, ...]) -> None:
        pass


class BurstsAfterRestart(Buffer):
    """Counts what was accepted from 0 again, as if no step had been trained before the crash."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._num_accepted = 0

    def _check_age(self, groups: tuple[Group, ...]) -> None:
        pass


class LosesDrops(Buffer):
    """A group that is dropped is in no ledger."""

    async def take(self, seconds: float) -> StepGroups:
        return StepGroups(groups=(await super().take(seconds)).groups, dropped=())


class NeverWakes(Buffer):
    """New weights are live, and the feeder is not told."""

    async def release(self, version: int) -> None:
        self._version = version

    async def steer(self, *, lead: int | None, most_running: int | None) -> None:
        pass


class LooksSeldom(Buffer):
    """Free places are seen a while after they become free."""

    async def wait_for_room(self, seconds: float) -> int:
        await asyncio.sleep(0.5)
        return await super().wait_for_room(seconds)


class KeepsPlaces(Buffer):
    """A dropped group keeps its place until its step is full, which it then cannot become."""

    @property
    def room(self) -> int:
        return super().room - self._num_dropped


class ForgetsStarted(RolloutSource):
    """A checkpoint holds where the stream is, not what of it was trained."""

    def __init__(self, setup: Any, stream: Any, *rest: Any, **options: Any) -> None:
        super().__init__(setup, stream, *rest, **options)
        self._whole_stream = stream

    def state(self) -> dict[str, Scalar | list[Scalar]]:
        return {**super().state(), **self._whole_stream.state()}


class TrainsTwice(RolloutSource):
    """The last group of a step is handed out again with the next, in place of its first."""

    _again: Group | None = None

    async def take(self, step: int) -> Batch:
        batch = await super().take(step)
        first, self._again = self._again or batch.groups[0], batch.groups[-1]
        return replace(batch, groups=(first, *batch.groups[1:]))


class BeginsAnew(RolloutSource):
    """A resumed run draws from the beginning."""

    def load_state(self, state: Any) -> None:
        pass


FAULTS = {
    "the bound is kept": (Parts(make_buffer=AdmitsTooMany),),
    # Synchronous: a step that starts too many would have to give some back.
    "the bound is kept|giving draws back": (Parts(make_buffer=BurstsAfterRestart),),
    "each draw is trained or dropped, once": (
        Parts(make_source=TrainsTwice),
        Parts(make_source=ForgetsStarted),
        Parts(make_source=BeginsAnew),
    ),
    # The one that is missed first is behind a later one.
    "each draw is trained or dropped, once|nobody starves": (Parts(make_buffer=LosesDrops),),
    "no progress": (Parts(make_buffer=NeverWakes), Parts(make_buffer=KeepsPlaces)),
    "nothing waits for what has not been started": (Parts(make_buffer=LooksSeldom),),
}


@pytest.mark.parametrize(
    ("promise", "parts"), [(promise, parts) for promise, faulty in FAULTS.items() for parts in faulty], ids=str
)
def test_a_fault_that_breaks_a_promise_is_found(promise: str, parts: Parts) -> None:
    with pytest.raises((AssertionError, BackendError, Deadlock), match=promise):
        live_and_check(drawn(range(200)), parts)
