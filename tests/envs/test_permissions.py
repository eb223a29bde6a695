"""What is not granted does not happen, and secrets are seen by the tool that names them and by nobody else."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import pickle
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

import pytest

from temper.envs.permissions import Permissions, Secrets, SideEffectLog
from temper.envs.tool_calls import write_call
from temper.envs.tool_env import ToolEnv
from temper.envs.tools import Tool, tool
from temper.errors import UserError
from temper.protocols import EnvOpening, EnvReply
from temper.types import EventKind, Message, Task

TASK = Task(id="t", messages=(Message(role="user", content="go"),))
VALUE = 'k3y/with+"odd" signs&more'


def play(env: ToolEnv, name: str, arguments: Mapping[str, Any]) -> tuple[EnvOpening, EnvReply]:
    async def turn() -> tuple[EnvOpening, EnvReply]:
        opening = await env.start(TASK, 0)
        return opening, await env.step(Message(role="assistant", content=write_call("hermes", name, arguments)))

    return asyncio.run(turn())


def kinds(reply: EnvReply) -> list[EventKind]:
    return [event.kind for event in reply.events]


class World:
    """Counts what was done to it."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def tools(self) -> list[Tool]:
        @tool()
        def look() -> str:
            return "quiet"

        @tool(effect="write")
        def note(text: str) -> None:
            self.done.append(text)

        @tool(effect="irreversible")
        def launch(target: str) -> None:
            self.done.append(target)

        return [look, note, launch]


def test_out_of_the_box_tools_may_only_read() -> None:
    world = World()
    assert kinds(play(ToolEnv(world.tools()), "look", {})[1]) == [EventKind.TOOL_CALL]
    _, reply = play(ToolEnv(world.tools()), "note", {"text": "x"})
    assert kinds(reply) == [EventKind.DENIED]
    assert "'note' may write, which is not permitted" in reply.messages[0].content
    assert world.done == []


def test_names_are_granted_and_denied_one_by_one() -> None:
    granted = Permissions(effects=frozenset({"read", "write"}), only=frozenset({"note"}))
    assert kinds(play(ToolEnv(World().tools(), permissions=granted), "look", {})[1]) == [EventKind.DENIED]
    never = Permissions(never=frozenset({"look"}))
    assert kinds(play(ToolEnv(World().tools(), permissions=never), "look", {})[1]) == [EventKind.DENIED]
    with pytest.raises(UserError, match="effect 'wirte' is unknown"):
        Permissions(effects=frozenset({"wirte"}))


def test_a_write_that_is_granted_is_done_and_recorded() -> None:
    world, log = World(), SideEffectLog()
    env = ToolEnv(world.tools(), permissions=Permissions(effects=frozenset({"write"})), log=log)
    _, reply = play(env, "note", {"text": "x"})
    assert kinds(reply) == [EventKind.TOOL_CALL, EventKind.SIDE_EFFECT]
    assert world.done == ["x"]
    assert [(entry.tool, entry.arguments, entry.outcome) for entry in log.entries] == [
        ("note", "note(text='x')", "done")
    ]


def test_an_irreversible_act_is_only_described_unless_someone_approves() -> None:
    def broken(chosen: Tool, arguments: Mapping[str, Any]) -> bool:
        raise ValueError("the approver is out")

    async def late(chosen: Tool, arguments: Mapping[str, Any]) -> bool:
        await asyncio.sleep(60)
        return True

    every = frozenset({"read", "write", "irreversible"})
    refusals = [None, lambda chosen, arguments: False, lambda chosen, arguments: "yes", broken, late]
    for approve in refusals:
        world = World()
        permissions = Permissions(effects=every, approve=approve, approve_seconds=0.05)  # type: ignore[arg-type]
        env = ToolEnv(world.tools(), permissions=permissions)
        _, reply = play(env, "launch", {"target": "moon"})
        assert "dry run: launch(target='moon') was not carried out" in reply.messages[0].content
        assert kinds(reply) == [EventKind.DESCRIBED]
        assert world.done == []
        assert env.side_effects == ()


def test_an_approved_act_is_carried_out_with_the_arguments_that_were_shown() -> None:
    world, asked = World(), []

    def approve(chosen: Tool, arguments: Mapping[str, Any]) -> bool:
        asked.append((chosen.name, dict(arguments)))
        arguments["target"] = "earth"  # type: ignore[index]
        return True

    env = ToolEnv(world.tools(), permissions=Permissions(approve=approve))
    _, reply = play(env, "launch", {"target": "moon"})
    assert asked == [("launch", {"target": "moon"})]
    assert world.done == ["moon"]
    assert EventKind.SIDE_EFFECT in kinds(reply)


@tool(secrets=("api_token",))
def fetch(path: str, api_token: str) -> str:
    return api_token if path == "is it right?" else "fine"


@tool(secrets=("api_token",), effect="write")
def careless(way: str, api_token: str) -> Any:
    """Planted: lets its credential out in every way it can think of."""
    logging.getLogger("tool").debug("called")
    if way == "error":
        raise ValueError(f"401 for https://host/?token={urllib.parse.quote(api_token, safe='')} and {api_token!r}")
    encoded = base64.b64encode(api_token.encode()).decode()
    return {"plain": api_token, "base64": encoded, "hex": api_token.encode().hex(), "padding": "x" * 50}


def leaks(text: str) -> bool:
    raw = VALUE.encode()
    forms = [VALUE, urllib.parse.quote(VALUE, safe=""), base64.b64encode(raw).decode(), raw.hex()]
    forms += [json.dumps(VALUE)[1:-1], "k3y/with", "k3y%2Fwith"]
    return any(form in text for form in forms)


@pytest.mark.parametrize("way", ["error", "output"])
def test_a_secret_appears_in_no_observation_schema_event_or_log(way: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    permissions = Permissions(effects=frozenset({"write"}), secrets=Secrets({"api_token": VALUE}))
    env = ToolEnv([careless], permissions=permissions)
    opening, reply = play(env, "careless", {"way": way})
    assert "[api_token]" in reply.messages[0].content
    for text in (repr(opening), repr(reply), repr(env.side_effects), repr(permissions), caplog.text):
        assert not leaks(text)
    assert leaks(VALUE)  # the net itself works
    assert leaks(urllib.parse.quote(VALUE, safe=""))


def test_a_cut_observation_does_not_show_half_a_secret() -> None:
    from temper.envs.tool_env import ToolLimits

    @tool(secrets=("api_token",))
    def echo(api_token: str) -> str:
        return "x" * 10 + api_token

    env = ToolEnv(
        [echo],
        permissions=Permissions(secrets=Secrets({"api_token": VALUE})),
        limits=ToolLimits(observation_characters=20),
    )
    assert "k3y" not in play(env, "echo", {})[1].messages[0].content


def test_a_policy_that_guesses_a_secret_is_not_told_so() -> None:
    permissions = Permissions(secrets=Secrets({"api_token": VALUE}))
    _, reply = play(ToolEnv([fetch], permissions=permissions), "fetch", {"path": VALUE})
    assert not leaks(repr(reply.events))


def test_a_tool_gets_the_secrets_it_names_and_no_others() -> None:
    secrets = Secrets({"api_token": VALUE, "other_token": "something else"})
    assert secrets.for_tool(fetch) == {"api_token": VALUE}
    with pytest.raises(UserError, match="needs the secret 'api_token'"):
        Secrets().for_tool(fetch)
    with pytest.raises(UserError, match="needs the secret"):
        play(ToolEnv([fetch]), "fetch", {"path": "x"})


def test_secrets_cannot_be_shown_written_or_too_short_to_hide(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = Secrets({"api_token": VALUE})
    assert repr(secrets) == "Secrets(api_token)"
    with pytest.raises(TypeError, match="not written"):
        pickle.dumps(secrets)
    with pytest.raises(UserError, match="has 3 characters"):
        Secrets({"pin": "123"})
    monkeypatch.setenv("API_TOKEN", VALUE)
    assert Secrets.from_environment(["api_token"]).for_tool(fetch) == {"api_token": VALUE}
    with pytest.raises(UserError, match="NO_SUCH is not set"):
        Secrets.from_environment(["no_such"])


def test_a_change_that_does_not_come_back_ends_the_episode_as_a_failure() -> None:
    @tool(effect="write", seconds=0.02)
    def slow() -> None:
        time.sleep(0.3)

    env = ToolEnv([slow], permissions=Permissions(effects=frozenset({"write"})))
    _, reply = play(env, "slow", {})
    assert reply.is_done
    assert reply.status == "tool_error"  # never trained on: nobody knows what the world is now
    assert kinds(reply) == [EventKind.TOOL_CALL, EventKind.TOOL_TIMEOUT, EventKind.SIDE_EFFECT]
    assert env.side_effects[0].outcome == "timed out"
