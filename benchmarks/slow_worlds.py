"""Environments for benchmarks/episodes.py that take their time: asleep, or computing.

Apart from the benchmark, so that worker processes import these and not the engine.
"""

from __future__ import annotations

import asyncio
import random
import time

from temper.envs.threads import InThread
from temper.protocols import EnvOpening, EnvReply
from temper.types import Message, Task


class SlowSteps:
    """Without async: each step sleeps between `low` and `high` seconds, by the seed, and computes for `burns`."""

    def __init__(self, low: float, high: float, turns: int, burns: float) -> None:
        self._span, self._turns, self._burns = (low, high), turns, burns

    def start(self, task: Task, seed: int) -> EnvOpening:
        self._draws = random.Random(f"{seed}/{task.id}")
        return EnvOpening(messages=task.messages)

    def seconds(self) -> float:
        self._turns -= 1
        return self._draws.uniform(*self._span)

    def step(self, message: Message) -> EnvReply:
        time.sleep(self.seconds())
        until = time.thread_time() + self._burns
        while time.thread_time() < until:
            pass
        return self.reply()

    def reply(self) -> EnvReply:
        return EnvReply(messages=(Message(role="user", content="go on"),), is_done=self._turns == 0)

    def close(self) -> None: ...


class SlowAsync:
    """The same with async; computes nothing."""

    def __init__(self, low: float, high: float, turns: int, burns: float) -> None:
        self._inside = SlowSteps(low, high, turns, burns)

    async def start(self, task: Task, seed: int) -> EnvOpening:
        return self._inside.start(task, seed)

    async def step(self, message: Message) -> EnvReply:
        await asyncio.sleep(self._inside.seconds())
        return self._inside.reply()

    async def close(self) -> None: ...


def threaded(low: float, high: float, turns: int, burns: float) -> InThread:
    return InThread(lambda: SlowSteps(low, high, turns, burns), seconds=60 + high)
