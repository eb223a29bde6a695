"""The simplest environment: a question, one reply, done."""

from __future__ import annotations

from temper.protocols import EnvOpening, EnvReply
from temper.types import Message, Task


class SingleTurn:
    """Shows the task's messages and the tools of its row, and ends with the first reply: no tool is run."""

    async def start(self, task: Task, seed: int) -> EnvOpening:
        return EnvOpening(messages=task.messages, tools=task.tools)

    async def step(self, message: Message) -> EnvReply:
        return EnvReply(is_done=True)

    async def close(self) -> None:
        pass
