"""What episodes are played with when nobody draws: prompts by their lengths, an environment without words, a reward by
lot.

Owns: the setup of simulated episodes. Refuses: time but that of environment and reward; several turns, which count as
one answer.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from zlib import crc32

from temper.protocols import EnvOpening, EnvReply, Sampler
from temper.rollout.episode import EpisodeSetup
from temper.types import Group, Message, SamplingParams, Score, Task, Trajectory

STOP_ID = 0
PromptTokens = Callable[[Task], int]


class Prompts:
    """Implements rollout.episode.EpisodeRenderer: a prompt is its task's name, and as long as that task's."""

    def __init__(self, tokens_of: PromptTokens) -> None:
        self._tokens_of = tokens_of
        self._ids: dict[str, tuple[int, ...]] = {}

    def open(self, task: Task) -> EnvOpening:
        if task.id not in self._ids:
            self._ids[task.id] = (crc32(task.id.encode()) & 0x7FFFFFFF,) * max(1, self._tokens_of(task))
        return EnvOpening(messages=(Message(role="user", content=task.id),))

    def prompt_messages(self, task: Task) -> tuple[Message, ...]:
        return task.messages

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        return self._ids[messages[-1].content]

    def extend_ids(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        replies: Sequence[Message],
        history: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[int, ...]:
        raise AssertionError("an episode is one answer")

    def decode(self, ids: Sequence[int]) -> str:
        return "."


class _OneAnswer:
    """Implements protocols.Env."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts

    async def start(self, task: Task, seed: int) -> EnvOpening:
        return self._prompts.open(task)

    async def step(self, message: Message) -> EnvReply:
        return EnvReply(is_done=True)

    async def close(self) -> None:
        pass


class Lots:
    """Implements rollout.episode.Scorer: members of a group differ, except in a share of the groups."""

    def __init__(self, *, seconds: float = 0.0, degenerate: float = 0.0, seed: int = 0) -> None:
        self._seconds, self._degenerate, self._seed = seconds, degenerate, seed

    async def score(self, task: Task, trajectory: Trajectory) -> tuple[Score, Mapping[str, Score]]:
        if self._seconds:
            await asyncio.sleep(self._seconds)
        is_alike = self._degenerate and random.Random(f"{self._seed}/{trajectory.group_id}").random() < self._degenerate
        score = Score.of(1.0 if is_alike else float(trajectory.index % 2))
        return score, {"lot": score}

    async def score_turns(
        self, task: Task, trajectory: Trajectory
    ) -> tuple[Score, Mapping[str, Score], Sequence[float]]:
        return *await self.score(task, trajectory), ()

    def weighted(self, parts: Mapping[str, Score]) -> Mapping[str, Score]:
        return parts

    async def evolve(self, groups: Sequence[Group]) -> None:
        """Learns nothing."""


def make_setup(
    sampler: Sampler, scorer: Lots, tokens_of: PromptTokens, *, max_new_tokens: int, episode_seconds: float
) -> EpisodeSetup:
    prompts = Prompts(tokens_of)
    return EpisodeSetup(
        sampler=sampler,
        renderer=prompts,
        scorer=scorer,
        make_env=lambda name: _OneAnswer(prompts),
        params=SamplingParams(max_new_tokens=max_new_tokens, stop_ids=(STOP_ID,)),
        max_turns=1,
        episode_seconds=episode_seconds,
        seed=0,
    )
