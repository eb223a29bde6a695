from __future__ import annotations

import asyncio
import inspect

import pytest

from temper.catalogue import GENERATORS
from temper.envs.env import ENVS, find_env, make_env
from temper.envs.library.calculator import arithmetic
from temper.envs.single_turn import SingleTurn
from temper.errors import UserError
from temper.protocols import EnvOpening


def test_environments_are_fresh_and_unknown_names_get_a_suggestion() -> None:
    assert isinstance(make_env("single_turn"), SingleTurn)
    assert make_env("single_turn") is not make_env("single_turn")
    with pytest.raises(UserError, match='Did you mean "single_turn"'):
        make_env("singleturn")
    assert asyncio.run(make_env("single_turn").close()) is None


WITH_TOOLS = [name for name, factory in ENVS.items() if "call_format" in inspect.signature(factory).parameters]


def test_every_environment_whose_policy_writes_calls_can_show_its_tools_in_words() -> None:
    assert {"calculator", "files", "mcp", "python", "search", "shop", "verifiers"} <= set(WITH_TOOLS)
    unreachable = [name for name in WITH_TOOLS if "show_tools" not in inspect.signature(ENVS[name]).parameters]
    assert unreachable == []


@pytest.mark.parametrize("name", ["calculator", "files", "search", "shop"])
def test_show_tools_of_a_recipe_reaches_the_policy(name: str) -> None:
    task = GENERATORS[name](0, 1) if name in GENERATORS else arithmetic(0, 1)

    async def opening(show: str) -> EnvOpening:
        env = find_env(name, {"show_tools": show, "call_format": "hermes"})()
        try:
            return await env.start(task, 0)
        finally:
            await env.close()

    schema, words = asyncio.run(opening("schema")), asyncio.run(opening("text"))
    assert schema.tools
    assert words.tools == ()
    said = "\n".join(message.content for message in words.messages)
    assert all(f"{tool['function']['name']}(" in said for tool in schema.tools)
    assert "<tool_call>" in said
    with pytest.raises(UserError, match=r"show_tools='loudly' is unknown\. Known: auto, schema, text, no"):
        find_env(name, {"show_tools": "loudly"})()
