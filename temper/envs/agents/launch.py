"""Starting agents and ending them: the nursery's other side.

Owns: the nursery process, a connection for each episode, deadlines. Refuses: judging how an agent ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from temper.envs.agents import nursery
from temper.envs.agents.agent import AgentEnd, AgentSettings, result_of
from temper.errors import TaskError, UserError
from temper.sandbox.cgroup import ControlGroup, find_homes
from temper.sandbox.enclosure import agent_filter, enclose
from temper.sandbox.forwarder import MOST_TASKS

START_SECONDS = 120.0
"""For the imports of an agent's function."""
MODEL_SOCKET = "TEMPER_MODEL_SOCKET"
"""The variable with the path of the socket that an agent behind a wall asks through."""
END_SECONDS = nursery.KILL_SECONDS + nursery.GRACE_SECONDS + 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """How its supervisor says that an agent ended."""

    code: int | None
    """Exit code; negative: the signal that killed it. None: it was ended, and `why` says why."""
    stdout: str
    stderr: str
    left: int
    """Processes that it left running; they were killed."""
    why: str

    @property
    def last_words(self) -> str:
        """The end of what it wrote to standard error."""
        return self.stderr.strip()[-400:]

    @property
    def how(self) -> str:
        """In words."""
        if self.why:
            return f"was ended: {self.why}"
        if self.code and self.code < 0:
            return f"ended with signal {-self.code}"
        left = f" and left {self.left} processes running" if self.left and not self.code else ""
        return f"ended with exit code {self.code}{left}"

    @property
    def problem(self) -> str | None:
        """What was wrong with it, or None."""
        tail = f". It said: {self.last_words}" if self.last_words else ""
        return f"the agent {self.how}{tail}" if self.why or self.code or self.left else None


class Nursery:
    """Implements rollout.agents.AgentRunner. Starts with the first agent; close() ends it and everything it started."""

    def __init__(
        self,
        settings: AgentSettings,
        closed: Sequence[str] = (),
        heard: Callable[[ProcessEnd], object] = lambda end: None,
    ) -> None:
        """closed: folders of which an agent behind a wall sees only what its command names. heard: is told how each
        agent ended, also those that are ended from here."""
        self._settings = settings
        self._closed = closed
        self._heard = heard
        self._homes = find_homes() if settings.is_sandboxed else None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    async def run(self, task: Mapping[str, Any], variables: Mapping[str, str], posted: object = None) -> AgentEnd:
        """Plays one episode. Cancelling it ends the agent; it returns when nothing of the agent is left. posted: of no
        interest here, for a program ends by itself, whatever it has handed in before."""
        path = await self.start()
        try:
            reader, writer = await asyncio.open_unix_connection(path, limit=2 * nursery.OUTPUT_BYTES)
        except OSError as error:
            raise TaskError(f"the process that starts agents has gone: {error}") from error
        group = ControlGroup(self._homes) if self._homes is not None else None
        try:
            told = {name: value for name, value in variables.items() if name != MODEL_SOCKET}
            order = {"task": task, "variables": told, "group": "", **self._start_of_agent(variables)}
            if group is not None:  # rlimits do not count the processes of root
                order["group"] = str(group.limit_processes(MOST_TASKS))
            writer.write(json.dumps(order).encode() + b"\n")
            return self._end_of(await reader.read())
        finally:
            with contextlib.suppress(OSError, TimeoutError, TaskError):
                writer.write_eof()  # hanging up ends the agent; the answer says that all is gone
                if late := await asyncio.wait_for(reader.read(), END_SECONDS):
                    self._end_of(late)
            writer.close()
            if group is not None:
                group.remove()

    def _start_of_agent(self, variables: Mapping[str, str]) -> dict[str, Any]:
        """The words of its command, and the filter of system calls where it runs behind a wall."""
        settings = self._settings
        if not settings.is_sandboxed:
            return {"words": shlex.split(settings.command), "filter": ""}
        port = urlsplit(variables["OPENAI_BASE_URL"]).port
        assert port, "the endpoint says where it listens"
        wall = enclose(
            settings.command,
            python=settings.python,
            socket=variables[MODEL_SOCKET],
            port=port,
            closed=self._closed,
            hide=settings.hidden,
        )
        return {"words": wall, "filter": agent_filter().hex()}

    def _end_of(self, answer: bytes) -> AgentEnd:
        try:
            end = ProcessEnd(**json.loads(answer))
        except (ValueError, TypeError) as error:
            raise TaskError("the agent's supervisor died without a word") from error
        self._heard(end)
        return AgentEnd(problem=end.problem, result=result_of(end.stdout))

    @property
    def keys(self) -> tuple[str, ...]:
        return ()

    async def tell_over(self, key: str) -> None:
        """Nobody is left to be told."""

    async def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            await _end(self._process)
        if self._folder is not None:
            self._folder.cleanup()
        self._process = self._folder = None

    async def start(self) -> str:
        """The path of its socket. Raises UserError for a function that cannot be imported."""
        async with self._lock:
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="temper-agents-")
            path = os.path.join(self._folder.name, "socket")
            if self._process is None or self._process.returncode is not None:  # it may have been killed for its memory
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                self._process = await self._start(path)
            return path

    async def _start(self, path: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            self._settings.python,
            str(Path(nursery.__file__).resolve()),
            path,
            self._settings.function,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self._settings.variables(),
            start_new_session=True,
        )
        try:
            await _until_ready(process, self._settings.function or self._settings.python)
        except BaseException:  # also who cancels this leaves no process
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await _end(process)
            raise
        return process


async def _until_ready(process: asyncio.subprocess.Process, name: str) -> None:
    assert process.stdout is not None, "it says when it is ready"
    said, last = b"", b""
    try:
        async with asyncio.timeout(START_SECONDS):
            while said != b"ready\n":  # before it comes what modules print when they are imported
                last, said = said or last, await process.stdout.readline()
                if not said:
                    break
    except TimeoutError:
        raise UserError(f'env "agent": {name} was not imported within {START_SECONDS:g} s') from None
    if not said:
        raise UserError(f'env "agent": {name} cannot be started: {last.decode(errors="replace").strip()}')


async def _end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None, "its end is how it is told to end"
    process.stdin.close()
    ended = asyncio.ensure_future(process.wait())
    await asyncio.wait((ended,), timeout=END_SECONDS)
    if not ended.done():
        process.kill()
