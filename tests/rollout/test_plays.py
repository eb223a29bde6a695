"""The time of an episode is over when it is, and stands still while the trainer holds everybody back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from temper.engine.pieces import PiecedAnswer
from temper.rollout.controls.joined import JoinedSampler, Pauses
from temper.rollout.episode import EpisodeSetup, run_episode
from temper.rollout.plays import TimeLimit, standing_still
from temper.simulate.clock import run_virtual
from temper.types import Completion, Finish, Request, SamplingParams, Status, Trajectory
from tests.fakes.episodes import Letters
from tests.fakes.sampler import FakeSampler
from tests.rollout.test_episode import STOP, TASK, Always, TalkingEnv


class Slow(FakeSampler):
    """Takes two seconds for an answer, and has nothing of it before."""

    def __init__(self) -> None:
        super().__init__(lambda request: [ord("h"), STOP])
        self._is_stopped = asyncio.Event()

    async def generate(self, request: Request) -> Completion:
        self._is_stopped.clear()
        try:
            await asyncio.wait_for(self._is_stopped.wait(), 2.0)
        except TimeoutError:
            return await super().generate(request)
        return PiecedAnswer(request, None).ended(Finish.INTERRUPT)

    async def interrupt(self, request_id: str) -> None:
        self._is_stopped.set()


def play_through_a_pause(pause: float, *, limit: float) -> Trajectory:
    """Two turns of two seconds each; the trainer pauses everybody in the first."""
    pauses = Pauses()
    setup = EpisodeSetup(
        sampler=JoinedSampler(Slow(), pauses, None),
        renderer=Letters(),
        scorer=Always(),
        make_env=lambda name: TalkingEnv(),
        params=SamplingParams(max_new_tokens=4, stop_ids=(STOP,)),
        max_turns=4,
        episode_seconds=limit,
        seed=0,
    )

    async def run() -> Trajectory:
        playing = asyncio.create_task(run_episode(setup, TASK, group_id="g", index=0, request_id="r"))
        await asyncio.sleep(1.0)
        await pauses.start()
        await asyncio.sleep(pause)
        pauses.end()
        return await playing

    return run_virtual(run())


@pytest.mark.parametrize(
    ("pause", "limit", "status"),
    [(500.0, 5.5, Status.COMPLETED), (0.1, 3.0, Status.TIMEOUT), (500.0, 3.0, Status.TIMEOUT)],
)
def test_pauses_of_the_trainer_are_not_the_episodes_time(pause: float, limit: float, status: Status) -> None:
    assert play_through_a_pause(pause, limit=limit).status is status


def test_waits_side_by_side_count_once_and_what_follows_has_what_was_left() -> None:
    async def wait(seconds: float) -> None:
        with standing_still():
            await asyncio.sleep(seconds)

    async def run() -> float:
        limit, loop = TimeLimit(10.0), asyncio.get_running_loop()
        async with limit.bounds():
            await asyncio.sleep(4.0)
            await asyncio.gather(wait(30.0), wait(50.0))
        began = loop.time()
        with pytest.raises(TimeoutError):
            async with limit.bounds():  # another play of the same episode
                await asyncio.sleep(100.0)
        return loop.time() - began

    assert run_virtual(run()) == pytest.approx(6.0)


def test_an_episode_that_is_given_up_in_a_wait_ends_as_given_up() -> None:
    async def held(work: Awaitable[None]) -> None:
        async with TimeLimit(5.0).bounds():
            with standing_still():
                await work

    async def run() -> None:
        task = asyncio.create_task(held(asyncio.sleep(100.0)))
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with standing_still():  # of no episode
            await asyncio.sleep(1.0)

    run_virtual(run())
