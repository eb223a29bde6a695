"""An episode ends with a status and a score that cannot lie, whatever its parts do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from temper.engine.fake import FakeSampler
from temper.errors import BackendError
from temper.protocols import Env, EnvOpening, EnvReply
from temper.rollout.episode import EpisodeSetup, Scorer, run_episode
from temper.types import Group, Message, Request, SamplingParams, Score, ScoreKind, Status, Task, Trajectory

STOP = 0
TASK = Task(id="t", messages=(Message(role="user", content="ab"),), answer="x")


class Letters:
    """One id per character, 0 ends."""

    def prompt_messages(self, task: Task) -> tuple[Message, ...]:
        return task.messages

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        return tuple(ord(c) for m in messages for c in m.content)

    def extend_ids(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        replies: Sequence[Message],
        history: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[int, ...]:
        return (*prompt_ids, *completion_ids, *self.prompt_ids(replies))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in ids if token != STOP)


class Always:
    async def score(self, task: Task, trajectory: Trajectory) -> tuple[Score, Mapping[str, Score]]:
        return Score.of(1.0), {"always": Score.of(1.0)}

    def weighted(self, parts: Mapping[str, Score]) -> Mapping[str, Score]:
        return parts

    async def evolve(self, groups: Sequence[Group]) -> None:
        """Learns nothing."""


@dataclass
class TalkingEnv:
    """Answers twice, then is done."""

    fault: Callable[[], object] | None = None
    num_steps: int = 0
    closed: list[bool] = field(default_factory=list)

    async def start(self, task: Task, seed: int) -> EnvOpening:
        return EnvOpening(messages=task.messages)

    async def step(self, message: Message) -> EnvReply:
        self.num_steps += 1
        if self.fault is not None:
            self.fault()
        return EnvReply(messages=(Message(role="user", content=">"),), is_done=self.num_steps == 2)

    async def close(self) -> None:
        self.closed.append(True)


class Paying(Always):
    """Says what each turn earned."""

    async def score_turns(
        self, task: Task, trajectory: Trajectory
    ) -> tuple[Score, Mapping[str, Score], Sequence[float]]:
        return *await self.score(task, trajectory), [0.25] * len(trajectory.turns)


def play(
    env: Env,
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
        make_env=lambda name: env,
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
