"""Tools of an MCP server: a process of its own for every episode (stdio), or a session over streamable HTTP.

Owns: environment "mcp", the connection's lifetime, MCP tools as Temper's tools. Refuses: the rest of the protocol
(resources, prompts, sampling); believing that a tool is harmless because it says nothing of what it changes.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from typing import Any, cast

from temper.envs.adapters.third_party import failure, require_package, within
from temper.envs.permissions import Permissions
from temper.envs.tool_env import Presentation, ToolEnv
from temper.envs.tools import EFFECTS, Effect, Tool, ToolError
from temper.errors import TaskError, UserError
from temper.protocols import EnvOpening
from temper.types import Event, Task

START_SECONDS = 60.0
"""For starting the server, the handshake and the list of tools."""
CLOSE_SECONDS = 15.0
"""The package asks a process to end, then terminates it, then kills it, with some seconds for each."""
MAX_PAGES = 100
CONNECTION_CLOSED = -32000
"""JSON-RPC's code for a peer that has gone."""


class McpConnection:
    """One session with one server. All of it lives in a task of its own: the package must leave where it entered."""

    def __init__(self, server: str | Sequence[str], environment: Sequence[str] = ()) -> None:
        """server: an address, or the command that starts one. environment: names of variables that it may see."""
        self._package = require_package("mcp", extra="mcp", package="mcp", what='environment "mcp"')
        self._server = server
        self._environment = environment
        self._client: Any = None
        self._owner: asyncio.Task[None] | None = None
        self._ending: asyncio.Future[None] | None = None

    async def open(self) -> list[Any]:
        """The server's tools, as the package describes them."""
        loop = asyncio.get_running_loop()
        ready, self._ending = loop.create_future(), loop.create_future()
        self._owner = loop.create_task(self._own(ready, self._ending))
        try:
            await asyncio.wait({ready, self._owner}, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if self._owner.done() and (error := self._owner.exception()) is not None:
                raise failure(f"the MCP server {self._name}", error) from error
            if not ready.done():
                raise TaskError(f"the MCP server {self._name} did not answer within {START_SECONDS:g} s")
            return await within(self._list(), seconds=START_SECONDS, what=f"listing the tools of {self._name}")
        except BaseException:  # also when the episode is cancelled: a process must not outlive it
            await self.close()
            raise

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """What the tool says; ToolError: it failed, TaskError: the server has gone. The caller sets the deadline."""
        if self._owner is None or self._owner.done():
            raise TaskError(f"the MCP server {self._name} has ended")
        try:
            result = await self._client.call_tool(name, arguments)
        except self._package.MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise failure(f"the MCP server {self._name}", error) from error
            raise ToolError(str(error)) from error
        text = _text_of(result)
        if result.is_error:
            raise ToolError(text)
        return text

    async def close(self) -> None:
        """Ends the session and, with it, a server started by us. May be called twice."""
        owner, self._owner = self._owner, None
        if owner is None or self._ending is None:
            return
        if self._client is None:
            owner.cancel()  # still on its way in
        elif not self._ending.done():
            self._ending.set_result(None)
        await asyncio.wait({owner}, timeout=CLOSE_SECONDS)
        if not owner.done():
            owner.cancel()
        elif not owner.cancelled():
            owner.exception()  # read, so that asyncio does not report it as overlooked

    async def _own(self, ready: asyncio.Future[None], ending: asyncio.Future[None]) -> None:
        with open(os.devnull, "w") as nowhere:  # the server's chatter is not for the run's terminal
            async with self._package.Client(self._transport(nowhere), read_timeout_seconds=None) as client:
                self._client = client
                ready.set_result(None)
                await ending

    def _transport(self, errors: Any) -> Any:
        if isinstance(self._server, str):
            return self._server
        command, *arguments = self._server
        variables = {name: os.environ[name] for name in self._environment if name in os.environ}
        parameters = self._package.StdioServerParameters(command=command, args=arguments, env=variables)
        return self._package.stdio_client(parameters, errlog=errors)

    async def _list(self) -> list[Any]:
        tools, cursor = list[Any](), None
        for _ in range(MAX_PAGES):
            page = await self._client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                return tools
        raise TaskError(f"the MCP server {self._name} lists tools without end")

    @property
    def _name(self) -> str:
        return self._server if isinstance(self._server, str) else " ".join(self._server)


def _text_of(result: Any) -> str:
    parts = [block.text if block.type == "text" else f"[{block.type}]" for block in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def effect_of(annotations: Any, declared: Effect) -> Effect:
    """What the user declared, or worse where the server itself says that the tool destroys.

    A server's hints never lift a restriction: one that calls its tool read-only may lie, and by the protocol a client
    must not trust it.
    """
    return "irreversible" if getattr(annotations, "destructive_hint", None) else declared


def as_tool(connection: McpConnection, described: Any, *, declared: Effect, seconds: float) -> Tool:
    """An MCP tool as one of Temper's, called over the connection."""

    async def run(**arguments: Any) -> str:
        return await connection.call(described.name, arguments)

    return Tool(
        name=described.name,
        description=" ".join((described.description or "").split()),
        parameters=described.input_schema,
        run=run,
        effect=effect_of(described.annotations, declared),
        seconds=seconds,
    )


class McpEnv(ToolEnv):
    """An episode with the tools of one MCP server; it ends with the first message that calls none.

    server: "http://..." or the command as a list; a command is started anew for every episode.
    environment: variables the server may see besides PATH, HOME and the like. Nothing else is passed on.
    call_format, show_tools: how the policy writes calls and sees tools, see tool_env.Presentation.
    effects: what tools change: read, write or irreversible, in one word for all of them, or by name; those that are not
    named are irreversible. The server's own word is not taken for it.
    allow: read, write, and names of irreversible tools that run. Any other irreversible one is only described: there is
    no word for all of them.
    only: names of the tools the policy may call; empty: all.
    """

    def __init__(
        self,
        *,
        server: str | list[str],
        environment: list[str] | None = None,
        call_format: str = "auto",
        show_tools: str = "auto",
        effects: str | dict[str, str] = "irreversible",
        allow: list[str] | None = None,
        only: list[str] | None = None,
        tool_seconds: float = 30.0,
    ) -> None:
        _require_server(server)
        allowed = ["read"] if allow is None else allow
        self._effect = effects if isinstance(effects, str) else "irreversible"
        self._effects = {} if isinstance(effects, str) else dict(effects)
        for name in (self._effect, *self._effects.values()):
            if name not in EFFECTS:
                raise UserError(f'env "mcp": effect "{name}" is unknown. Known: {", ".join(EFFECTS)}.')
        if "irreversible" in allowed:
            raise UserError(
                'env "mcp": what cannot be undone is allowed tool by tool. Name the tools in options.allow, e.g. '
                'allow = ["read", "send_mail"]'
            )
        self._connection = McpConnection(server, environment or ())
        self._only = frozenset(only or ())
        self._seconds = tool_seconds
        self._approved = frozenset(allowed) - set(EFFECTS)
        effects_granted = frozenset(allowed) & set(EFFECTS)
        self._described = list[Any]()
        super().__init__(
            self._open,
            permissions=Permissions(effects=effects_granted),
            presentation=Presentation(call_format=call_format, show_tools=show_tools),
        )

    def _is_allowed(self, tool: Tool) -> bool:
        return tool.name in self._approved or super()._is_allowed(tool)

    async def start(self, task: Task, seed: int) -> EnvOpening:
        assert not self._described, "an environment is single-use"
        self._described = await self._connection.open()
        for option, names in (("only", self._only), ("effects", self._effects.keys()), ("allow", self._approved)):
            if missing := names - {tool.name for tool in self._described}:
                raise UserError(f'env "mcp": the server has no tool "{min(missing)}", which options.{option} names.')
        return await super().start(task, seed)

    def _declared(self, name: str) -> Effect:
        return cast(Effect, self._effects.get(name, self._effect))

    async def close(self) -> tuple[Event, ...]:
        await self._connection.close()
        return await super().close()

    def _open(self, task: Task, seed: int) -> Iterable[Tool]:
        return [
            as_tool(self._connection, tool, declared=self._declared(tool.name), seconds=self._seconds)
            for tool in self._described
            if not self._only or tool.name in self._only
        ]


def _require_server(server: str | list[str]) -> None:
    if isinstance(server, str):
        if not server.startswith(("http://", "https://")):
            raise UserError(
                f'env "mcp": server={server!r} must be an address ("http://127.0.0.1:8000/mcp") or a command as a list.'
            )
    elif not server or not all(isinstance(part, str) for part in server):
        raise UserError(f'env "mcp": server={server!r} must be a list of texts, e.g. ["python", "server.py"].')
    elif shutil.which(server[0]) is None:
        raise UserError(f'env "mcp": there is no command "{server[0]}". Give its whole path, or install it.')
