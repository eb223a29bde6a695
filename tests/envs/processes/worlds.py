"""Environments for tests of worker processes: what the policy says decides how they fail."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import signal
import sys
import time
from collections.abc import Callable

from temper.envs.threads import InThread
from temper.envs.tool_env import Presentation, ToolEnv
from temper.envs.tools import make_tool
from temper.protocols import EnvOpening, EnvReply
from temper.types import Event, EventKind, Message, Status, Task

TOOLS = ({"type": "function", "function": {"name": "dig", "parameters": {"type": "object", "depth": (1, 2)}}},)


def spin() -> None:
    """In one call of C code that never gives the interpreter back."""
    sum(iter(int, 1))


FAULTS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(3),
    "segfault": lambda: ctypes.string_at(0),
    "spin": spin,
    "raise": lambda: 1 // 0,
    "leave": lambda: sys.exit(0),
    "hold": lambda: time.sleep(0.5),
    "long": lambda: time.sleep(30),
}


class SyncWorld:
    """Without async. Everything that an answer can carry is in one; sets show whether hashes are alike."""

    num_open = 0

    def __init__(self, *, size: int = 9) -> None:
        self._size = size

    def start(self, task: Task, seed: int) -> EnvOpening:
        SyncWorld.num_open += 1
        self._draws = random.Random(f"{seed}/{task.id}")
        opening = Message(role="user", content=f"{task.messages[0].content} {self._draws.random()}")
        messages = (Message(role="system", content="half \ud83d"), opening)
        return EnvOpening(messages=messages, tools=TOOLS, state="at the start")

    def step(self, message: Message) -> EnvReply:
        word = message.content
        FAULTS.get(word, int)()
        replies = {
            "pid": str(os.getpid()),
            "open": str(SyncWorld.num_open),
            "torch": str("torch" in sys.modules),
            "set": str(list({"one", "two", "three", "four", "five"})),
        }
        said = replies.get(word, f"{word} {self._draws.randint(0, self._size)}")
        return EnvReply(
            messages=(Message(role="tool", content=said, name="dig"), Message(role="user", content="é\udc00")),
            reward={"free": None, "nan": float("nan"), "odd": lambda: 1}.get(word, self._draws.random()),  # type: ignore[arg-type]
            is_done=word in ("end", "bad"),
            events=(Event(kind=EventKind.TOOL_CALL, name="dig", detail=word, seconds=0.25, cost=2.0),),
            status=Status.BAD_FORMAT if word == "bad" else None,
            result=f"result of {word}" if word != "free" else None,
            state=f"heard {word}" if word != "free" else None,
        )

    def close(self) -> None:
        SyncWorld.num_open -= 1


class World:
    """The same with async: in the event loop of its process."""

    def __init__(self, *, size: int = 9) -> None:
        self._inside = SyncWorld(size=size)

    async def start(self, task: Task, seed: int) -> EnvOpening:
        return self._inside.start(task, seed)

    async def step(self, message: Message) -> EnvReply:
        await asyncio.sleep({"wait": 60.0, "nap": 0.5}.get(message.content, 0.0))
        return self._inside.step(message)

    async def close(self) -> tuple[Event, ...]:
        self._inside.close()
        return (Event(kind=EventKind.SIDE_EFFECT, name="dig", detail="told at the end"),)


class Priced(ToolEnv):
    """Each call costs 2."""

    def __init__(self) -> None:
        shown = Presentation(call_format="plain", show_tools="no", mark_untrusted=False)
        super().__init__([make_tool(self.buy, cost=2.0)], presentation=shown)

    def buy(self) -> str:
        return "bought"

    def reward(self, answer: str) -> float:
        return 1.0


def threaded(*, size: int = 9) -> InThread:
    return InThread(lambda: SyncWorld(size=size))
