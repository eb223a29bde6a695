"""Controls keep every promise of a run without them, on thousands of random schedules with drops, crashes and resumes.

The bound, exactly-once and progress are those of test_schedules.py. Beside them: nobody who was put off waits longer
than patience says, an answer is the one that it would have been without controls, and its tokens say who drew them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from temper.errors import BackendError
from temper.protocols import Sampler
from temper.rollout.buffer import StepGroups
from temper.rollout.controls.concurrency import Concurrency, next_running
from temper.rollout.controls.joined import JoinedSampler
from temper.rollout.controls.oversample import Oversample
from temper.rollout.controls.partial import Partial
from temper.rollout.controls.tail import ShortSampler, Tail
from temper.rollout.draws import CONSUMED
from temper.rollout.source import RolloutSource
from temper.simulate.clock import Deadlock
from temper.types import Completion, Request, Scalar, Task
from tests.fakes.controlled import SETS, draw_controlled
from tests.fakes.promises import live_and_check
from tests.fakes.schedules import Parts, live_through


def test_every_schedule_with_controls_keeps_its_promises() -> None:
    assert live_and_check(map(draw_controlled, range(150))) > 90, "schedules without crashes prove little"


@pytest.mark.heavy
@pytest.mark.parametrize("part", range(4))
def test_four_thousand_schedules_with_controls_keep_their_promises(part: int) -> None:
    """Ten thousand without controls are in test_schedules.py; one with them takes three times as long."""
    assert live_and_check(map(draw_controlled, range(1000 + 1000 * part, 2000 + 1000 * part))) > 600


def test_schedules_meet_what_controls_do() -> None:
    """Or they would prove nothing: every set of controls, groups that are cut and caught up on, answers in pieces."""
    sets, cut, overtaken, mixed, oldest = Counter[tuple[str, ...]](), 0, 0, 0, 0
    for seed in range(150):
        schedule = draw_controlled(seed)
        history = live_through(schedule)
        sets[tuple(sorted(control["name"] for control in schedule.controls))] += 1
        newest = -1
        for _, step in sorted(history.steps.items()):
            cut += step.num_cut
            overtaken += sum(draw < newest for draw, _ in step.trained)
            mixed += sum(len(set(answer.versions)) > 1 for answer in step.answers)
            oldest += max(step.ages) == schedule.staleness > 0
            newest = max(newest, *(draw for draw, _ in step.trained))
    assert set(sets) == {tuple(sorted(names)) for together in SETS.values() for names in together}
    assert min(sets.values()) >= 4
    assert min(cut, overtaken, mixed, oldest) > 60


class LosesWhoWasCut(RolloutSource):
    """A group that was cut is never started again."""

    def _give_back(self, draw: int, task: Task) -> None:
        pass


class ForgetsConsumed(RolloutSource):
    """A checkpoint does not hold who was trained before an earlier draw: they are trained again after a resume."""

    def state(self) -> dict[str, Scalar | list[Scalar]]:
        return {**super().state(), CONSUMED: []}


class TrainsTheRestLater(RolloutSource):
    """What a synchronous step leaves over is kept for the next, whose weights did not draw it."""

    async def _give_rest_back(self) -> None:
        pass


class ForgetsWhoWasCut(Oversample):
    """A checkpoint does not hold the late list: its draws are cut again, with all of their patience before them."""

    def state(self) -> dict[str, Scalar | list[Scalar]]:
        return {}


class CutsLateOnes(Oversample):
    """Late steps start more than they need as well, and cut the late ones again."""

    def lead(self) -> int | None:
        return self._lead


class NeverLong(Tail):
    """Nobody who was put off is ever caught up on."""

    def begin(self, version: int) -> None:
        super().begin(version)
        self._rounds.is_late = False


class PutsOffWithoutEnd(Tail):
    """A short step puts off one after another, however many wait."""

    def wrap(self, draw: int, sampler: Sampler) -> Sampler:
        return sampler if self._limit is None else ShortSampler(sampler, self._limit)


class TrainsStumps(Tail):
    """An answer that passes the limit is trained as far as it goes."""

    def wrap(self, draw: int, sampler: Sampler) -> Sampler:
        return sampler if self._limit is None else _Stumps(sampler, self._limit)


class _Stumps(ShortSampler):
    async def generate(self, request: Request) -> Completion:
        params = dataclasses.replace(request.params, max_new_tokens=self._limit)
        return await self._sampler.generate(dataclasses.replace(request, params=params))


class ForgetsVersions(Partial):
    """All tokens of an answer in pieces count as those of its last."""

    def wrap(self, draw: int, sampler: Sampler) -> Sampler:
        return _Renewed(sampler, self._pauses, self.setting.decode)


class _Renewed(JoinedSampler):
    async def generate(self, request: Request) -> Completion:
        whole = await super().generate(request)
        return dataclasses.replace(whole, versions=[whole.versions[-1]] * len(whole.versions))


class DropsFirstPieces(Partial):
    """Only what was drawn since the last pause is trained."""

    def wrap(self, draw: int, sampler: Sampler) -> Sampler:
        return _LastPiece(sampler, self._pauses, self.setting.decode)


class _LastPiece(JoinedSampler):
    async def generate(self, request: Request) -> Completion:
        while True:
            piece, is_paused = await self._pauses.draw(self._sampler, request)
            if not is_paused:
                return piece


class NeverGoesOn(Partial):
    """New weights are live, and nobody ends the pause."""

    def begin(self, version: int) -> None:
        pass


class LimitsToNothing(Concurrency):
    """A sampler under pressure is relieved until nothing runs."""

    async def filled(self, taken: StepGroups, num_queued: int) -> None:
        await super().filled(taken, num_queued)
        self._running = next_running(self._running, {"preemptions": 1.0}, self._kv_use)


FAULTS: dict[str, tuple[Parts, ...]] = {
    "nobody starves|each draw is trained or dropped, once": (Parts(make_source=LosesWhoWasCut),),
    "nobody starves": (
        Parts(controls=(ForgetsWhoWasCut,)),
        Parts(controls=(CutsLateOnes,)),
        Parts(controls=(NeverLong,)),
    ),
    "each draw is trained or dropped, once": (
        Parts(make_source=ForgetsConsumed),
        Parts(controls=(PutsOffWithoutEnd,)),
    ),
    "the bound is": (Parts(make_source=TrainsTheRestLater),),
    "an answer is as long as it would have been": (
        Parts(controls=(TrainsStumps,)),
        Parts(controls=(DropsFirstPieces,)),
    ),
    "each token has the version that drew it": (Parts(controls=(ForgetsVersions,)),),
    "no progress": (Parts(controls=(NeverGoesOn,)), Parts(controls=(LimitsToNothing,))),
}


@pytest.mark.parametrize(
    ("promise", "parts"), [(promise, parts) for promise, faulty in FAULTS.items() for parts in faulty], ids=str
)
def test_a_fault_in_a_control_is_found(promise: str, parts: Parts) -> None:
    with pytest.raises((AssertionError, BackendError, Deadlock), match=promise):
        live_and_check(map(draw_controlled, range(300)), parts)
