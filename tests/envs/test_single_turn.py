from __future__ import annotations

import asyncio
import json

from temper.envs.single_turn import SingleTurn
from temper.protocols import EnvOpening, EnvReply
from temper.types import Message, Task


def test_one_reply_ends_the_episode() -> None:
    messages = (Message(role="user", content="q"),)

    async def go() -> tuple[EnvOpening, EnvReply]:
        env = SingleTurn()
        shown = await env.start(Task(id="t", messages=messages), seed=0)
        reply = await env.step(Message(role="assistant", content="a"))
        await env.close()
        return shown, reply

    assert asyncio.run(go()) == (EnvOpening(messages=messages), EnvReply(is_done=True))


def test_the_tools_of_a_row_are_shown() -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    task = Task(id="t", messages=(Message(role="user", content="q"),), extra={"tools": json.dumps([tool])})
    assert asyncio.run(SingleTurn().start(task, seed=0)).tools == (tool,)
