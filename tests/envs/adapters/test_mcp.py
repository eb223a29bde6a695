from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from temper.envs.adapters import mcp as adapter
from temper.envs.adapters.mcp import McpConnection, McpEnv, effect_of
from temper.errors import TaskError, UserError, install_line
from temper.evals.environments import CHECKS, EnvTrial
from temper.protocols import EnvReply
from temper.types import EventKind, Message, Task

mcp = pytest.importorskip("mcp")
uvicorn = pytest.importorskip("uvicorn")

KNOWN = {"add": "read", "put": "write", **dict.fromkeys(("fail", "sleep", "about", "die"), "read")}
"""What the user of the server below says that its tools change."""
SERVER = '''
import os, sys, time
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

server = MCPServer("shelf")
shelf = []
read = ToolAnnotations(read_only_hint=True)
write = ToolAnnotations(read_only_hint=False, destructive_hint=False)

@server.tool(annotations=read)
def add(a: int, b: int) -> int:
    """Adds two whole numbers."""
    return a + b

@server.tool(annotations=write)
def put(thing: str) -> str:
    """Puts a thing on the shelf."""
    shelf.append(thing)
    return ", ".join(shelf)

@server.tool(annotations=read)
def fail() -> str:
    """Always fails."""
    raise ToolError("the shelf broke")

@server.tool(annotations=read)
def sleep(seconds: float) -> str:
    """Sleeps."""
    time.sleep(seconds)
    return "awake"

@server.tool(annotations=read)
def about() -> str:
    """What the server knows of its process."""
    known = os.environ
    return f"{os.getpid()} {known.get('MCP_TEST_SECRET', 'no secret')} {known.get('MCP_TEST_NAME', 'no name')}"

@server.tool(annotations=read)
def die() -> str:
    """Ends the server."""
    os._exit(3)

@server.tool()
def burn() -> str:
    """Says nothing of what it changes."""
    return "burnt"

if __name__ == "__main__":
    server.run("stdio")
'''


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    path = tmp_path / "shelf_server.py"
    path.write_text(SERVER)
    return [sys.executable, str(path)]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    scope: dict[str, Any] = {"__name__": "shelf"}
    exec(SERVER, scope)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()  # from now on clients queue, also before the server runs
    server = uvicorn.Server(uvicorn.Config(scope["server"].streamable_http_app(), log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
    server.should_exit = True
    server.force_exit = True
    thread.join(timeout=10.0)


TASK = Task(id="t", messages=(Message(role="user", content="Use the shelf."),))


def call(name: str, **arguments: Any) -> Message:
    body = json.dumps({"name": name, "arguments": arguments})
    return Message(role="assistant", content=f"<tool_call>{body}</tool_call>")


async def play(env: McpEnv, *messages: Message) -> list[EnvReply]:
    try:
        await env.start(TASK, 0)
        return [await env.step(message) for message in messages]
    finally:
        await env.close()


def kinds(reply: EnvReply) -> list[EventKind]:
    return [event.kind for event in reply.events]


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_tools_of_a_server_can_be_shown_in_words(url: str) -> None:
    async def go() -> None:
        env = McpEnv(effects=KNOWN, server=url, show_tools="text")
        try:
            opening = await env.start(TASK, 0)
            assert opening.tools == ()
            assert "add(a, b): Adds two whole numbers." in opening.messages[0].content
            reply = await env.step(Message(role="assistant", content="add(19, 23)"))
            assert "42" in reply.messages[0].content
        finally:
            await env.close()

    asyncio.run(go())


@pytest.mark.parametrize("how", ["stdio", "http"])
def test_tools_are_listed_with_their_schemas_and_called(how: str, command: list[str], url: str) -> None:
    async def go() -> None:
        env = McpEnv(effects=KNOWN, server=command if how == "stdio" else url)
        try:
            opening = await env.start(TASK, 0)
            add = next(tool["function"] for tool in opening.tools if tool["function"]["name"] == "add")
            assert add["description"] == "Adds two whole numbers."
            assert add["parameters"]["properties"]["a"]["type"] == "integer"
            assert opening.messages == TASK.messages
            reply = await env.step(call("add", a=19, b=23))
            assert "42" in reply.messages[0].content
            assert (reply.messages[0].role, reply.messages[0].name) == ("tool", "add")
            assert kinds(reply) == [EventKind.TOOL_CALL]
            assert (await env.step(Message(role="assistant", content="It is 42."))).is_done
        finally:
            await env.close()

    asyncio.run(go())


@pytest.mark.parametrize("how", ["stdio", "http"])
def test_a_tool_that_fails_is_something_for_the_policy_to_read(how: str, command: list[str], url: str) -> None:
    (reply,) = asyncio.run(play(McpEnv(effects=KNOWN, server=command if how == "stdio" else url), call("fail")))
    assert "the shelf broke" in reply.messages[0].content
    assert EventKind.TOOL_ERROR in kinds(reply)
    assert not reply.is_done


def test_arguments_that_do_not_fit_are_bad_calls_and_reach_no_server(url: str) -> None:
    replies = asyncio.run(play(McpEnv(effects=KNOWN, server=url), call("add", a="x", b=1), call("addd", a=1, b=1)))
    assert [kinds(reply) for reply in replies] == [[EventKind.BAD_CALL]] * 2
    assert "did you mean 'add'" in replies[1].messages[0].content


def test_a_tool_that_hangs_times_out_and_blocks_no_other_episode(command: list[str]) -> None:
    async def go() -> tuple[list[EnvReply], list[EnvReply]]:
        return await asyncio.gather(
            play(McpEnv(effects=KNOWN, server=command, tool_seconds=0.5), call("sleep", seconds=60)),
            play(McpEnv(effects=KNOWN, server=command), call("add", a=1, b=1)),
        )

    (late,), (fine,) = asyncio.run(go())
    assert EventKind.TOOL_TIMEOUT in kinds(late)
    assert "2" in fine.messages[0].content


def test_every_episode_has_a_process_of_its_own_that_ends_with_it(command: list[str]) -> None:
    put: dict[str, Any] = {"server": command, "allow": ["read", "write"]}
    first = asyncio.run(play(McpEnv(effects=KNOWN, **put), call("put", thing="apple"), call("about")))
    second = asyncio.run(play(McpEnv(effects=KNOWN, **put), call("put", thing="pear"), call("about")))
    assert "apple" in first[0].messages[0].content
    assert "apple" not in second[0].messages[0].content, "one episode saw what another had put down"
    processes = [int(replies[1].messages[0].content.split("\n")[1].split()[0]) for replies in (first, second)]
    assert len(set(processes)) == 2
    assert not any(map(is_alive, processes))


def test_a_cancelled_episode_leaves_no_process(command: list[str]) -> None:
    async def go() -> int:
        env = McpEnv(effects=KNOWN, server=command)
        await env.start(TASK, 0)
        reply = await env.step(call("about"))
        process = int(reply.messages[0].content.split("\n")[1].split()[0])

        async def hang() -> None:
            try:
                await env.step(call("sleep", seconds=60))
            finally:
                await env.close()

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await hang()
        return process

    assert not is_alive(asyncio.run(go()))


def test_a_server_that_dies_is_a_task_error_and_not_an_answer(command: list[str]) -> None:
    with pytest.raises(TaskError, match="MCP server"):
        asyncio.run(play(McpEnv(effects=KNOWN, server=command), call("die")))


def test_a_server_that_was_killed_is_noticed_at_the_next_call(command: list[str]) -> None:
    async def go() -> None:
        env = McpEnv(effects=KNOWN, server=command)
        try:
            await env.start(TASK, 0)
            reply = await env.step(call("about"))
            os.kill(int(reply.messages[0].content.split("\n")[1].split()[0]), signal.SIGKILL)
            with pytest.raises(TaskError, match="MCP server"):
                await env.step(call("add", a=1, b=1))
        finally:
            await env.close()

    asyncio.run(go())


def test_a_program_that_is_no_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go(*server: str) -> None:
        await McpConnection(server).open()

    with pytest.raises(TaskError, match="MCP server"):
        asyncio.run(go(sys.executable, "-c", "print('hello')"))
    monkeypatch.setattr(adapter, "START_SECONDS", 0.5)
    with pytest.raises(TaskError, match=r"did not answer within 0\.5 s"):
        asyncio.run(go(sys.executable, "-c", "import time; time.sleep(60)"))


def test_secrets_of_the_run_are_not_passed_on_unless_named(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_TEST_SECRET", "hunter2")
    monkeypatch.setenv("MCP_TEST_NAME", "ada")
    (reply,) = asyncio.run(play(McpEnv(effects=KNOWN, server=command, environment=["MCP_TEST_NAME"]), call("about")))
    assert "no secret ada" in reply.messages[0].content


def test_tools_that_change_things_run_only_when_allowed(url: str) -> None:
    denied = asyncio.run(play(McpEnv(effects=KNOWN, server=url), call("put", thing="apple"), call("burn")))
    assert [kinds(reply) for reply in denied] == [[EventKind.DENIED], [EventKind.DESCRIBED]]
    allowed = asyncio.run(
        play(
            McpEnv(effects=KNOWN, server=url, allow=["read", "write", "burn"]),
            call("put", thing="apple"),
            call("burn"),
        )
    )
    assert all(EventKind.SIDE_EFFECT in kinds(reply) for reply in allowed)
    assert "burnt" in allowed[1].messages[0].content
    with pytest.raises(UserError, match=r'no tool "bum", which options\.allow names'):
        asyncio.run(play(McpEnv(effects=KNOWN, server=url, allow=["bum"]), call("burn")))
    (read,) = asyncio.run(play(McpEnv(server=url, effects="read"), call("burn")))
    assert "burnt" in read.messages[0].content


def test_only_the_named_tools_are_shown(url: str) -> None:
    async def go(*only: str) -> list[str]:
        env = McpEnv(effects=KNOWN, server=url, only=list(only))
        try:
            return [tool["function"]["name"] for tool in (await env.start(TASK, 0)).tools]
        finally:
            await env.close()

    assert asyncio.run(go("add")) == ["add"]
    with pytest.raises(UserError, match='no tool "ad"'):
        asyncio.run(go("ad"))


@pytest.mark.parametrize("read_only", [True, False, None])
@pytest.mark.parametrize("declared", ["read", "write", "irreversible"])
def test_a_servers_hints_lift_no_restriction(read_only: bool | None, declared: Any) -> None:
    for destructive in (False, None):
        hints = SimpleNamespace(read_only_hint=read_only, destructive_hint=destructive)
        assert effect_of(hints, declared) == declared
    assert effect_of(SimpleNamespace(read_only_hint=read_only, destructive_hint=True), declared) == "irreversible"
    assert effect_of(None, declared) == declared


def test_a_tool_that_only_its_server_calls_read_only_does_not_run(url: str) -> None:
    (reply,) = asyncio.run(play(McpEnv(server=url), call("add", a=1, b=1)))
    assert kinds(reply) == [EventKind.DESCRIBED]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server": "localhost:8000"}, "must be an address"),
        ({"server": []}, "list of texts"),
        ({"server": ["no-such-program-here"]}, "no command"),
        ({"server": [sys.executable], "allow": ["irreversible"]}, "allowed tool by tool"),
        ({"server": [sys.executable], "effects": {"add": "reed"}}, 'effect "reed" is unknown'),
        ({"server": [sys.executable], "call_format": "xml"}, 'call_format "xml" is unknown'),
    ],
)
def test_mistakes_in_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        asyncio.run(play(McpEnv(**options)))


def test_without_the_package_the_install_line_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(UserError, match=re.escape(install_line("mcp"))):
        McpEnv(server="http://127.0.0.1:1/mcp")


def test_the_check_of_an_environment_calls_the_servers_tools_and_lists_what_they_may_do(url: str) -> None:
    task = replace(TASK, extra={"solution": json.dumps([["put", {"thing": "apple"}]])})
    trial = EnvTrial(
        make_env=lambda name: McpEnv(effects=KNOWN, server=url, allow=["read", "write"], only=["add", "put", "burn"]),
        tasks=[task],
        seed=0,
        seconds=60,
        score=None,
        pays=False,
    )
    said = asyncio.run(CHECKS["reach"](trial))[1]
    assert said.endswith("; tools: add: read, permitted, put: write, permitted, burn: irreversible, only described")
    is_fine, said = asyncio.run(CHECKS["repeats"](trial))
    assert not is_fine, "the shelf of a server that all episodes share outlives them"
    assert "answer 1 differs" in said
