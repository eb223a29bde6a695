"""An episode ends with a status and a score that cannot lie, whatever its parts do."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

import temper.rollout.episode as episodes
from temper import calls
from temper.envs.threads import InThread
from temper.errors import BackendError, EnvironmentLost
from temper.protocols import Env, EnvOpening, EnvReply
from temper.rollout.episode import EpisodeSetup, Scorer, run_episode
from temper.rollout.plays import MOST_SUSPECTED
from temper.turnstile import PER_TURN
from temper.types import Event, EventKind, Message, Request, SamplingParams, Score, ScoreKind, Status, Task, Trajectory
from tests.fakes.episodes import FakeScorer, Letters
from tests.fakes.sampler import FakeSampler

STOP = 0
TASK = Task(id="t", messages=(Message(role="user", content="ab"),), answer="x")


class Always(FakeScorer):
    async def score(self, task: Task, trajectory: Trajectory) -> tuple[Score, Mapping[str, Score]]:
        return Score.of(1.0), {"always": Score.of(1.0)}


@dataclass
class TalkingEnv:
    """Answers twice, then is done."""

    fault: Callable[[], object] | None = None
    num_steps: int = 0
    shows_results: bool = False
    states: Sequence[object] = (None, None, None)
    """At the start, and after each step."""
    closed: list[bool] = field(default_factory=list)

    async def start(self, task: Task, seed: int) -> EnvOpening:
        return EnvOpening(messages=task.messages, state=self.states[0])  # type: ignore[arg-type]

    async def step(self, message: Message) -> EnvReply:
        self.num_steps += 1
        if self.fault is not None:
            self.fault()
        result = f"after {self.num_steps}" if self.shows_results else None
        return EnvReply(
            messages=(Message(role="user", content=">"),),
            is_done=self.num_steps == 2,
            result=result,
            state=self.states[self.num_steps],  # type: ignore[arg-type]
        )

    async def close(self) -> None:
        self.closed.append(True)


class Paying(Always):
    """Says what each turn earned."""

    async def score_turns(
        self, task: Task, trajectory: Trajectory
    ) -> tuple[Score, Mapping[str, Score], Sequence[float]]:
        return *await self.score(task, trajectory), [0.25] * len(trajectory.turns)


def play(
    env: Env | Callable[[], Env],
    *,
    sampler: FakeSampler | None = None,
    scorer: Scorer | None = None,
    max_turns: int = 4,
    seconds: float = 5.0,
) -> Trajectory:
    setup = EpisodeSetup(
        sampler=sampler or FakeSampler(lambda request: [ord("h"), STOP]),
        renderer=Letters(),
        scorer=scorer or Always(),
        make_env=lambda name: env() if callable(env) else env,
        params=SamplingParams(max_new_tokens=4, stop_ids=(STOP,)),
        max_turns=max_turns,
        episode_seconds=seconds,
        seed=0,
    )
    return asyncio.run(run_episode(setup, TASK, group_id="g", index=0, request_id="r"))


def test_turns_extend_the_exact_ids_and_the_environment_is_closed() -> None:
    env = TalkingEnv()
    trajectory = play(env)
    assert trajectory.status is Status.COMPLETED
    assert [turn.completion.prompt_ids for turn in trajectory.turns] == [(97, 98), (97, 98, 104, STOP, 62)]
    assert trajectory.score == Score.of(1.0)
    assert env.closed == [True]


def test_what_turns_earned_is_beside_what_the_environment_gave() -> None:
    trajectory = play(TalkingEnv(), scorer=Paying())
    assert trajectory.turn_rewards == (0.25, 0.25)
    assert [turn.reward for turn in trajectory.turns] == [None, None], (
        "a second verifier must see the environment's own"
    )
    assert play(TalkingEnv()).turn_rewards == ()
    assert play(TalkingEnv(), scorer=Paying(), seconds=0.0).turn_rewards == (), "a failure earns nothing"


def test_running_out_of_turns_and_of_tokens_are_told_apart() -> None:
    assert play(TalkingEnv(), max_turns=1).status is Status.TRUNCATED_TURNS
    long = FakeSampler(lambda request: [ord("h")] * 9)
    assert play(TalkingEnv(), sampler=long).status is Status.TRUNCATED_LENGTH


def test_what_an_environment_has_to_show_is_judged_also_when_its_episode_is_cut() -> None:
    assert play(TalkingEnv(shows_results=True)).text == "after 2"
    cut = play(TalkingEnv(shows_results=True), max_turns=1)
    assert (cut.status, cut.text) == (Status.TRUNCATED_TURNS, "after 1")
    assert play(TalkingEnv()).result is None


def test_a_turn_has_the_name_of_the_state_in_which_it_began() -> None:
    assert [turn.state for turn in play(TalkingEnv(states=("door", "hall", "end"))).turns] == ["door", "hall"]
    assert [turn.state for turn in play(TalkingEnv()).turns] == [None, None]
    long = FakeSampler(lambda request: [ord("h")] * 9)
    assert [turn.state for turn in play(TalkingEnv(states=("door", "", "")), sampler=long).turns] == ["door"]


@pytest.mark.parametrize("states", [(7, None, None), (None, b"hall", None)])
def test_a_state_that_is_no_text_is_refused(states: tuple[object, ...]) -> None:
    trajectory = play(TalkingEnv(states=states))
    assert trajectory.status is Status.TOOL_ERROR
    assert "a name is text, or None" in str(trajectory.error)


def test_a_broken_environment_is_an_error_and_never_a_number() -> None:
    def crash() -> None:
        raise ValueError("no such tool")

    env = TalkingEnv(fault=crash)
    trajectory = play(env)
    assert trajectory.status is Status.TOOL_ERROR
    assert trajectory.score.kind is ScoreKind.ERROR
    assert "no such tool" in str(trajectory.score.reason)
    assert not trajectory.is_trainable
    assert env.closed == [True]


def test_a_hanging_sampler_is_a_timeout() -> None:
    async def forever(request: Request) -> None:
        await asyncio.sleep(60)

    trajectory = play(TalkingEnv(), sampler=FakeSampler(lambda request: [STOP], delay=forever), seconds=0.05)
    assert trajectory.status is Status.TIMEOUT
    assert trajectory.score.kind is ScoreKind.ERROR


def test_a_broken_backend_stops_everything() -> None:
    async def broken(request: Request) -> None:
        raise BackendError("the engine failed")

    with pytest.raises(BackendError):
        play(TalkingEnv(), sampler=FakeSampler(lambda request: [STOP], delay=broken))


def retry_for_ever() -> Any:
    """The planted fault: a retry loop that swallows its own cancellation."""

    async def work() -> None:
        while True:
            try:
                await asyncio.sleep(0.01)
            except:  # noqa: E722 - the fault under test
                continue

    return work()


def raise_it(kind: type[BaseException]) -> None:
    raise kind


FAULTS: dict[str, Callable[[], Any]] = {
    "exit": lambda: raise_it(SystemExit),
    "interrupt": lambda: raise_it(KeyboardInterrupt),
    "cancel": lambda: raise_it(asyncio.CancelledError),
    "crash": lambda: raise_it(ValueError),
}
PLACES = ["make", "start", "step", "close"]


class FaultyEnv:
    """Fails at one place, as asynchronous code does."""

    def __init__(self, place: str, fault: Callable[[], Any]) -> None:
        self._place, self._fault = place, fault
        if place == "make":
            fault()

    async def _meet(self, place: str) -> None:
        if place == self._place and (work := self._fault()) is not None:
            await work

    async def start(self, task: Task, seed: int) -> EnvOpening:
        await self._meet("start")
        return EnvOpening(messages=task.messages)

    async def step(self, message: Message) -> EnvReply:
        await self._meet("step")
        return EnvReply(is_done=True)

    async def close(self) -> None:
        await self._meet("close")


class SyncFaultyEnv:
    """The same, as synchronous code does, in a thread."""

    def __init__(self, place: str, fault: Callable[[], Any]) -> None:
        self._place, self._fault = place, fault
        self._meet("make")

    def _meet(self, place: str) -> None:
        if place == self._place:
            self._fault()

    def start(self, task: Task, seed: int) -> EnvOpening:
        self._meet("start")
        return EnvOpening(messages=task.messages)

    def step(self, message: Message) -> EnvReply:
        self._meet("step")
        return EnvReply(is_done=True)

    def close(self) -> None:
        self._meet("close")


def play_made(make_env: Callable[[str], Env], seconds: float = 5.0) -> Trajectory:
    setup = EpisodeSetup(
        sampler=FakeSampler(lambda request: [ord("h"), STOP]),
        renderer=Letters(),
        scorer=Always(),
        make_env=make_env,
        params=SamplingParams(max_new_tokens=4, stop_ids=(STOP,)),
        max_turns=4,
        episode_seconds=seconds,
        seed=0,
    )
    return calls.run(run_episode(setup, TASK, group_id="g", index=0, request_id="r"))


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_an_environment_raises_is_an_error_of_its_episode(fault: str, place: str, is_async: bool) -> None:
    def make(name: str) -> Env:
        if is_async:
            return FaultyEnv(place, FAULTS[fault])
        return InThread(lambda: SyncFaultyEnv(place, FAULTS[fault]), seconds=5.0)

    trajectory = play_made(make)
    assert trajectory.status is Status.TOOL_ERROR
    assert trajectory.score.kind is ScoreKind.ERROR
    names = {"exit": "SystemExit", "interrupt": "KeyboardInterrupt", "crash": "ValueError", "cancel": "ancel"}
    assert names[fault] in str(trajectory.error)


@pytest.mark.parametrize("place", ["start", "step", "close"])
def test_an_environment_that_cannot_be_cancelled_is_given_up(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(episodes, "CLOSE_SECONDS", 0.1)
    trajectory = play_made(lambda name: FaultyEnv(place, retry_for_ever), seconds=0.1)
    assert not trajectory.is_trainable
    assert trajectory.score.kind is ScoreKind.ERROR
    assert "took longer than 0.1 s" in str(trajectory.error)


def test_a_synchronous_environment_that_swallows_everything_is_given_up() -> None:
    done = threading.Event()

    def stuck() -> None:
        while not done.is_set():
            try:
                time.sleep(0.01)
            except:  # noqa: E722 - the fault under test
                continue

    try:
        trajectory = play_made(lambda name: InThread(lambda: SyncFaultyEnv("step", stuck), seconds=0.1))
    finally:
        done.set()
    assert trajectory.status is Status.TOOL_ERROR
    assert "took longer than 0.1 s" in str(trajectory.error)


class EchoEnv:
    """Repeats what a policy can make a tool say, and pays as told."""

    def __init__(self, text: str, reward: Any = None) -> None:
        self._text, self._reward = text, reward

    async def start(self, task: Task, seed: int) -> EnvOpening:
        return EnvOpening(messages=task.messages)

    async def step(self, message: Message) -> EnvReply:
        return EnvReply(messages=(Message(role="user", content=self._text),), reward=self._reward)

    async def close(self) -> None:
        pass


def test_half_a_character_in_a_reply_is_shown_as_an_escape() -> None:
    trajectory = play(EchoEnv("a\ud800"), max_turns=2)
    assert trajectory.status is Status.TRUNCATED_TURNS
    assert trajectory.turns[0].replies[0].content == r"a\ud800"
    assert trajectory.turns[1].completion.prompt_ids[-6:] == tuple(map(ord, r"\ud800"))


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 10**400])
def test_what_is_no_finite_number_is_no_reward_of_a_turn(reward: Any) -> None:
    trajectory = play(EchoEnv(">", reward))
    assert trajectory.status is Status.TOOL_ERROR
    assert "finite number" in str(trajectory.error)


def test_what_a_refused_reply_did_to_the_world_is_recorded() -> None:
    wrote = Event(kind=EventKind.SIDE_EFFECT, name="write")

    class PaysNan(TalkingEnv):
        async def step(self, message: Message) -> EnvReply:
            return EnvReply(reward=float("nan"), events=(Event(kind=EventKind.TOOL_CALL, name="write"), wrote))

    trajectory = play(PaysNan())
    assert (trajectory.status, trajectory.turns) == (Status.TOOL_ERROR, ())
    assert trajectory.unplaced_events == (wrote,)


class OrphanedEnv(TalkingEnv):
    """Writes in every step. The process that it lives in is lost in the second step of as many plays as are left."""

    is_suspect = True

    def __init__(self, losses: list[None]) -> None:
        super().__init__()
        self.losses = losses

    async def step(self, message: Message) -> EnvReply:
        reply = await super().step(message)
        if self.num_steps == 2 and self.losses:
            self.losses.pop()
            raise EnvironmentLost("the process is lost", is_suspect=self.is_suspect)
        called = Event(kind=EventKind.TOOL_CALL, name="write", cost=2.0)
        return dataclasses.replace(reply, events=(called, Event(kind=EventKind.SIDE_EFFECT, name="write")))


class BesideOrphanedEnv(OrphanedEnv):
    is_suspect = False


def play_orphaned(num_losses: int, kind: type[OrphanedEnv] = OrphanedEnv) -> tuple[Trajectory, list[Request]]:
    losses: list[None] = [None] * num_losses
    sampler = FakeSampler(lambda request: [ord("h"), STOP])
    played = dataclasses.replace(play(lambda: kind(losses), sampler=sampler), seconds=0.0)
    return played, sampler.requests


def test_an_episode_whose_process_is_lost_is_played_anew_by_the_same_requests() -> None:
    undisturbed, asked = play_orphaned(0)
    for num_losses in range(1, MOST_SUSPECTED):
        again, asked_again = play_orphaned(num_losses)
        assert dataclasses.replace(again, unplaced_events=()) == undisturbed
        assert asked_again == asked * (num_losses + 1), "what is drawn is a function of the request"
        done = [event for event in again.unplaced_events if event.kind is EventKind.SIDE_EFFECT]
        assert [event.detail for event in done] == [
            f"play {number}, whose process was lost: " for number in range(1, num_losses + 1)
        ], "what was done to the world twice is recorded twice"


def test_an_episode_whose_process_is_lost_each_time_is_an_error() -> None:
    lost, asked = play_orphaned(MOST_SUSPECTED)
    assert (lost.status, lost.score.kind, lost.error) == (Status.TOOL_ERROR, ScoreKind.ERROR, "the process is lost")
    assert len(asked) == 2 * MOST_SUSPECTED


def test_losses_that_an_episode_had_no_part_in_are_not_counted_against_it() -> None:
    undisturbed, _ = play_orphaned(0)
    again, _ = play_orphaned(2 * MOST_SUSPECTED, BesideOrphanedEnv)
    assert dataclasses.replace(again, unplaced_events=()) == undisturbed


def test_each_play_that_was_lost_is_told_with_what_it_has_cost() -> None:
    for num_losses in range(MOST_SUSPECTED + 1):
        events = play_orphaned(num_losses)[0].events
        told = [event for event in events if event.kind is EventKind.REPLAYED]
        num_told = min(num_losses, MOST_SUSPECTED - 1)
        assert [(event.cost, event.detail) for event in told] == [(2.0, "the process is lost")] * num_told
        num_paid = num_losses + 2 * (num_losses < MOST_SUSPECTED)
        assert sum(event.cost for event in events) == 2.0 * num_paid, "one call before each loss, two in a whole play"


def test_all_plays_of_an_episode_share_its_time() -> None:
    class Slow(OrphanedEnv):
        async def step(self, message: Message) -> EnvReply:
            await asyncio.sleep(0.1)
            return await super().step(message)

    losses: list[None] = [None] * MOST_SUSPECTED
    assert play(lambda: Slow(losses), seconds=0.3).status is Status.TIMEOUT


class Crowd:
    """What a crowd of episodes does in each turn of the event loop."""

    def __init__(self, size: int) -> None:
        self.turn = 0
        self.counts: Counter[tuple[str, int]] = Counter()
        self.opening, self.closing = asyncio.Barrier(size), asyncio.Barrier(size)

    async def watch(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)

    def note(self, what: str) -> None:
        self.counts[what, self.turn] += 1

    def of(self, what: str) -> list[int]:
        return [count for (name, _), count in self.counts.items() if name == what]


class MeetingEnv(TalkingEnv):
    """Opens when all have started, and is closed when all are done: then all go on at once."""

    def __init__(self, crowd: Crowd) -> None:
        super().__init__()
        self.crowd = crowd

    async def start(self, task: Task, seed: int) -> EnvOpening:
        self.crowd.note("starts")
        await self.crowd.opening.wait()
        return await super().start(task, seed)

    async def close(self) -> None:
        await self.crowd.closing.wait()


class CountedLetters(Letters):
    def __init__(self, crowd: Crowd) -> None:
        super().__init__()
        self.crowd = crowd

    def prompt_messages(self, task: Task) -> tuple[Message, ...]:
        self.crowd.note("prompts")
        return super().prompt_messages(task)


class CountedScorer(Always):
    def __init__(self, crowd: Crowd) -> None:
        self.crowd = crowd

    async def score(self, task: Task, trajectory: Trajectory) -> tuple[Score, Mapping[str, Score]]:
        self.crowd.note("scores")
        return await super().score(task, trajectory)


def test_of_a_crowd_a_few_begin_open_and_are_scored_in_each_turn_of_the_loop() -> None:
    """All at once they would hold it: 512 threads of environments took half a second to start."""
    num = 8 * PER_TURN

    async def play_all() -> tuple[Crowd, list[Trajectory]]:
        crowd = Crowd(num)
        setup = EpisodeSetup(
            sampler=FakeSampler(lambda request: [ord("h"), STOP]),
            renderer=CountedLetters(crowd),
            scorer=CountedScorer(crowd),
            make_env=lambda name: MeetingEnv(crowd),
            params=SamplingParams(max_new_tokens=4, stop_ids=(STOP,)),
            max_turns=4,
            episode_seconds=60.0,
            seed=0,
        )
        watching = asyncio.create_task(crowd.watch())
        played = await asyncio.gather(
            *(run_episode(setup, TASK, group_id="g", index=n, request_id=f"r{n}") for n in range(num))
        )
        watching.cancel()
        return crowd, played

    crowd, played = asyncio.run(play_all())
    assert [one.status for one in played] == [Status.COMPLETED] * num
    for what in ("starts", "prompts", "scores"):
        assert sum(crowd.of(what)) == num
        assert max(crowd.of(what)) <= PER_TURN, what
