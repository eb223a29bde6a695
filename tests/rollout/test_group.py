"""A group plays its members and its baseline at once, and is trained only when both can be."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping

import pytest

from temper.envs.env import make_env
from temper.envs.single_turn import SingleTurn
from temper.protocols import Env, EnvReply
from temper.rollout.episode import EpisodeSetup
from temper.rollout.group import Extras, reason_to_drop, run_group
from temper.rollout.steps import StepSplit
from temper.types import (
    Completion,
    Event,
    EventKind,
    Group,
    Message,
    Request,
    SamplingParams,
    Score,
    Status,
    Task,
    Trajectory,
)
from tests.fakes.episodes import FakeScorer, Letters
from tests.fakes.sampler import FakeSampler

STOP = 0
TASK = Task(id="t", messages=(Message(role="user", content="ab"),))
Verdict = Callable[[Trajectory], Score]


class Judge(FakeScorer):
    def __init__(self, verdict: Verdict) -> None:
        self._verdict = verdict

    async def score(self, task: Task, trajectory: Trajectory) -> tuple[Score, Mapping[str, Score]]:
        return self._verdict(trajectory), {}


def by_index(trajectory: Trajectory) -> Score:
    return Score.of(float(trajectory.index))


def play(
    sampler: FakeSampler, verdict: Verdict = by_index, *, greedy: bool = False, steps: StepSplit | None = None
) -> Group:
    setup = EpisodeSetup(
        sampler=sampler, renderer=Letters(), scorer=Judge(verdict), make_env=make_env,
        params=SamplingParams(max_new_tokens=8, stop_ids=(STOP,), temperature=0.9, top_logprobs=2), max_turns=1,
        episode_seconds=5.0, seed=0,
    )  # fmt: skip
    extras = Extras(greedy=greedy, steps=steps)
    return asyncio.run(run_group(setup, TASK, draw=4, group_size=3, prefix="stage 1", extras=extras))


def script(request: Request) -> list[int]:
    return [ord("g") if request.params.temperature == 0 else ord("x"), STOP]


def test_a_group_without_a_baseline_asks_for_its_members_only() -> None:
    sampler = FakeSampler(script)
    group = play(sampler)
    assert [request.id for request in sampler.requests] == [f"stage 1/t#4/{index}/0" for index in range(3)]
    assert group.greedy is None
    assert all(t.step_starts == () for t in group.trajectories)


def test_the_greedy_attempt_is_one_more_at_temperature_zero_and_no_member() -> None:
    sampler = FakeSampler(script)
    group = play(sampler, greedy=True)
    assert [request.id for request in sampler.requests][-1] == "stage 1/t#4/greedy/0"
    assert [request.params.temperature for request in sampler.requests] == [0.9, 0.9, 0.9, 0.0]
    assert [request.params.top_logprobs for request in sampler.requests] == [2, 2, 2, 0]
    assert len(group.trajectories) == 3
    assert group.rewards == [0.0, 1.0, 2.0]
    assert group.greedy is not None
    assert (group.greedy.text, group.greedy.index, group.greedy.group_id) == ("g", -1, "t#4")
    assert group.greedy.score == Score.of(-1.0)


def test_the_greedy_attempt_asks_for_no_keep_set_which_an_engine_may_take_off() -> None:
    class TakesOff(FakeSampler):
        """As vLLM: at temperature 0 nothing is left out, whatever was asked, and the echo says so."""

        async def generate(self, request: Request) -> Completion:
            completion = await super().generate(request)
            if request.params.temperature > 0:
                return completion
            applied = dataclasses.replace(request.params, top_k=0, top_p=1.0, min_p=0.0)
            return dataclasses.replace(completion, keep_ids=None, params=applied)

    params = SamplingParams(max_new_tokens=8, stop_ids=(STOP,), temperature=0.9, top_k=5, top_p=0.9, min_p=0.1)
    setup = EpisodeSetup(
        sampler=TakesOff(script), renderer=Letters(), scorer=Judge(by_index), make_env=make_env, params=params,
        max_turns=1, episode_seconds=5.0, seed=0,
    )  # fmt: skip
    extras = Extras(greedy=True)
    group = asyncio.run(run_group(setup, TASK, draw=4, group_size=3, prefix="stage 1", extras=extras))
    assert group.greedy is not None
    assert group.greedy.score.is_value
    assert all(turn.completion.keep_ids for member in group.trajectories for turn in member.turns)


def test_the_greedy_attempt_does_not_wait_for_the_members() -> None:
    here: list[str] = []

    async def until_all_are_here(request: Request) -> None:
        here.append(request.id)
        async with asyncio.timeout(5):
            while len(here) < 4:
                await asyncio.sleep(0)

    play(FakeSampler(script, delay=until_all_are_here), greedy=True)
    assert len(here) == 4


@pytest.mark.parametrize("failure", [Score.error("judge answered 500"), Score.unscorable("judge answered 500")])
def test_a_group_whose_baseline_has_no_score_is_dropped_with_the_reason(failure: Score) -> None:
    group = play(FakeSampler(script), lambda t: failure if t.index == -1 else by_index(t), greedy=True)
    reason = reason_to_drop(group, min_members=2, drop_degenerate=False)
    assert reason == "the greedy baseline could not be scored: judge answered 500"
    scored = play(FakeSampler(script), greedy=True)
    assert reason_to_drop(scored, min_members=2, drop_degenerate=True) is None


def test_members_are_estimated_step_by_step_and_the_baseline_is_not() -> None:
    def steps(request: Request) -> list[int]:
        if "/step " in request.id:
            return [ord("y" if request.id.endswith("/0") else "n"), STOP]
        return [*map(ord, "a\ny"), STOP]

    sampler = FakeSampler(steps)
    group = play(
        sampler, lambda t: Score.of(float(t.text.endswith("y"))), greedy=True, steps=StepSplit(samples=4)
    )  # fmt: skip
    for trajectory in group.trajectories:
        assert trajectory.step_starts == (0, 2)
        assert trajectory.step_values == (0.25, 0.25)
    assert group.greedy is not None
    assert group.greedy.step_starts == ()
    assert len(sampler.requests) == 3 + 1 + 3 * 2 * 4
    assert len({request.id for request in sampler.requests}) == len(sampler.requests), "no two draw the same numbers"


def test_a_member_whose_steps_cannot_be_valued_is_not_trained() -> None:
    def verdict(trajectory: Trajectory) -> Score:
        is_fresh = trajectory.index == 1 and trajectory.text == "f"
        return Score.error("judge answered 500") if is_fresh else Score.of(float(trajectory.index))

    sampler = FakeSampler(lambda request: [ord("f" if "/step " in request.id else "x"), STOP])
    group = play(sampler, verdict, steps=StepSplit(samples=2))
    assert [t.is_trainable for t in group.trajectories] == [True, False, True]
    reason = reason_to_drop(group, min_members=3, drop_degenerate=False)
    assert reason == "too few scored members: step 0 has no value: judge answered 500"


def flaky(failures: int) -> Callable[[str], Env]:
    """Environments of which the first `failures` break."""
    made: list[int] = []

    class Flaky(SingleTurn):
        async def step(self, message: Message) -> EnvReply:
            if len(made) <= failures:
                raise RuntimeError("no connection")
            return await super().step(message)

    def make(name: str) -> Env:
        made.append(1)
        return Flaky()

    return make


class NobodysSampler(FakeSampler):
    """What it draws has no version."""

    def __init__(self, script: Callable[[Request], list[int]], version: int = -1) -> None:
        super().__init__(script)
        self._version = version


def play_against(opponent: FakeSampler, policy: FakeSampler, verdict: Verdict = by_index, retries: int = 0) -> Group:
    setup = EpisodeSetup(
        sampler=policy, renderer=Letters(), scorer=Judge(verdict), make_env=make_env,
        params=SamplingParams(max_new_tokens=8, stop_ids=(STOP,)), max_turns=1, episode_seconds=5.0, seed=0,
    )  # fmt: skip
    extras = Extras(opponent=dataclasses.replace(setup, sampler=opponent), retries=retries)
    return asyncio.run(run_group(setup, TASK, draw=4, group_size=4, prefix="stage 1", extras=extras))


def test_the_second_half_of_a_group_is_the_opponents() -> None:
    policy, opponent = FakeSampler(script), NobodysSampler(lambda _: [ord("o"), STOP])
    group = play_against(opponent, policy)
    assert [request.id for request in policy.requests] == ["stage 1/t#4/0/0", "stage 1/t#4/1/0"]
    assert [request.id for request in opponent.requests] == ["stage 1/t#4/opponent 2/0", "stage 1/t#4/opponent 3/0"]
    assert [(t.index, t.text, t.is_opponents) for t in group.trajectories] == [
        (0, "x", False), (1, "x", False), (2, "o", True), (3, "o", True),
    ]  # fmt: skip
    assert group.rewards == [0.0, 1.0, 2.0, 3.0], "judged alike"
    assert group.oldest_version == 0
    assert group.tokens_drawn == 8


def test_an_opponent_that_passes_for_the_policy_is_refused() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        play_against(NobodysSampler(script, version=3), FakeSampler(script))
    assert "has no version of the policy" in str(caught.value.exceptions[0])


def test_a_group_of_which_only_opponents_have_a_score_is_dropped() -> None:
    """Whatever its scores: nothing in it is the policy's, and its age would be that of no version."""
    group = play_against(
        NobodysSampler(script),
        FakeSampler(script),
        lambda t: Score.of(1.0) if t.index >= 2 else Score.error("judge is away"),
    )
    assert reason_to_drop(group, min_members=2, drop_degenerate=False) == "too few scored members: judge is away"


@pytest.mark.parametrize(("retries", "is_scored"), [(0, False), (1, False), (2, True), (5, True)])
def test_a_failed_episode_is_played_anew_as_often_as_allowed(retries: int, is_scored: bool) -> None:
    sampler = FakeSampler(script)
    setup = EpisodeSetup(
        sampler=sampler, renderer=Letters(), scorer=Judge(by_index), make_env=flaky(2),
        params=SamplingParams(max_new_tokens=8, stop_ids=(STOP,)), max_turns=1, episode_seconds=5.0, seed=0,
    )  # fmt: skip
    group = asyncio.run(run_group(setup, TASK, draw=0, group_size=1, prefix="s", extras=Extras(retries=retries)))
    assert group.trajectories[0].score.is_value == is_scored
    ids = [request.id for request in sampler.requests]
    assert len(ids) == len(set(ids)) == min(retries, 2) + 1, "every attempt draws other numbers"


def test_a_greedy_baseline_that_fails_is_played_anew_like_a_member() -> None:
    sampler = FakeSampler(script)
    setup = EpisodeSetup(
        sampler=sampler, renderer=Letters(), scorer=Judge(by_index), make_env=flaky(2),
        params=SamplingParams(max_new_tokens=8, stop_ids=(STOP,)), max_turns=1, episode_seconds=5.0, seed=0,
    )  # fmt: skip
    extras = Extras(greedy=True, retries=1)
    group = asyncio.run(run_group(setup, TASK, draw=0, group_size=1, prefix="s", extras=extras))
    assert group.greedy is not None
    assert (group.greedy.index, group.greedy.score.is_value) == (-1, True)
    assert {request.params.temperature for request in sampler.requests if "/greedy" in request.id} == {0.0}
    assert [request.id for request in sampler.requests if "/greedy" in request.id] == [
        "s/t#0/greedy/0", "s/t#0/greedy/retry 1/0",
    ]  # fmt: skip


def test_what_failed_attempts_and_the_baseline_did_to_the_world_is_not_lost() -> None:
    """Nobody has a row of theirs: a charge that an attempt made before it failed would never have been made."""
    made: list[int] = []

    class Charges(SingleTurn):
        async def step(self, message: Message) -> EnvReply:
            number = len(made)
            charged = Event(kind=EventKind.SIDE_EFFECT, name="charge", detail=f"done: number {number}")
            looked = Event(kind=EventKind.TOOL_CALL, name="look")
            return EnvReply(is_done=True, status=Status.TOOL_ERROR if number < 3 else None, events=(looked, charged))

    def make(name: str) -> Env:
        made.append(1)
        return Charges()

    setup = EpisodeSetup(
        sampler=FakeSampler(script), renderer=Letters(), scorer=Judge(by_index), make_env=make,
        params=SamplingParams(max_new_tokens=8, stop_ids=(STOP,)), max_turns=1, episode_seconds=5.0, seed=0,
    )  # fmt: skip
    group = asyncio.run(run_group(setup, TASK, draw=0, group_size=1, prefix="s", extras=Extras(retries=3)))
    (member,) = group.trajectories
    assert member.is_trainable
    assert [event.detail for event in member.unplaced_events] == [
        "attempt 1, which failed: done: number 1",
        "attempt 2, which failed: done: number 2",
    ]
    assert next(event.detail for event in member.events if event.kind is EventKind.SIDE_EFFECT) == "done: number 3"
    group = asyncio.run(run_group(setup, TASK, draw=0, group_size=2, prefix="s", extras=Extras(greedy=True)))
    said = [[event.detail.partition(":")[0] for event in member.unplaced_events] for member in group.trajectories]
    assert said == [["the greedy baseline"], []]
