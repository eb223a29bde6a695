"""A shell over the files of a task: commands behind the sandbox's wall, files read and changed. Its tests judge later.

Owns: env "shell". Refuses: judging (reward "code" runs the hidden tests when the episode is over, in sandboxes of its
own), and processes that outlive their command.

An episode's place is the snapshot of its files, held here. Each command gets a fresh sandbox with these files, and what
they are when it has ended is the next snapshot; whatever else it did is gone with the sandbox. So an episode begins and
is reset by copying a dictionary, and nothing can be left running that alters a later verdict.
"""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import os
from collections.abc import Iterable, Mapping
from functools import lru_cache

from temper.envs.library.files import FileSystem
from temper.envs.permissions import Permissions
from temper.envs.solutions import read_solution
from temper.envs.tool_calls import Calls
from temper.envs.tool_env import Presentation, ToolEnv, ToolLimits
from temper.envs.tools import Effect, Tool, ToolError, make_tool
from temper.errors import TaskError, UserError, did_you_mean
from temper.protocols import EnvReply
from temper.sandbox import Command, Limits, Outcome, Sandbox, require_sandbox
from temper.sandbox.repository import as_bytes, as_text, path_problem, read_repository, write_changes
from temper.types import Message, Scalar, Task

QUEUE_SECONDS = 300.0
"""How long a command may wait for a free sandbox. Not the policy's fault, so more than that is a failed episode."""
PATIENCE = 6.0
"""Wall time per second that a command may use: that the machine has less time for it is not the command's fault."""
DISK_BYTES = 64 << 20
TOOLS: dict[str, Effect] = {"run": "write", "read": "read", "write": "write", "replace": "write", "line": "write"}
"""Methods of Workplace that a policy may call."""


class Workplace:
    """The files of one episode and what can be done with them."""

    def __init__(self, task: Task, limits: Limits, characters: int) -> None:
        """characters: most that a command's output is shown with."""
        self._before = read_repository(task)
        self._system = FileSystem({path: as_text(content) for path, content in self._before.items()})
        self._limits, self._characters = limits, characters

    def changes(self) -> str:
        return write_changes(self._before, self._snapshot())

    async def run(self, command: str) -> str:
        """Runs a line of shell in the folder of the files and shows what it prints. Files of that folder are kept
        afterwards; processes, links and empty folders are not. There is no network.

        command: for sh; python is there, too
        """
        if "\0" in command:
            raise ToolError("a command cannot hold a null character")
        # Half a character, which JSON can spell, is no argument of any program.
        line = Command(command.encode(errors="replace").decode(), self._snapshot())
        try:
            async with asyncio.timeout(QUEUE_SECONDS + self._limits.wall_seconds):
                outcome = await _shared_sandbox().run(line, self._limits)
        except TimeoutError as error:
            raise TaskError(f"no sandbox was free for {QUEUE_SECONDS:g} s. Run fewer groups at once") from error
        if outcome.is_starved:
            raise TaskError(f"the machine is too busy: a command got {outcome.cpu_seconds:.1f} s of the processor")
        if (reason := _broken_limit(outcome, self._limits, line.keep_bytes)) is not None:
            raise ToolError(f"{reason}; nothing that it changed is kept\n{self._shown(outcome)}".rstrip())
        assert outcome.files is not None, "a command that broke no limit has them"
        self._system.files = {path: as_text(content) for path, content in outcome.files.items()}
        return self._shown(outcome) or "(no output)"

    def read(self, path: str) -> str:
        """Shows a file.

        path: of the file
        """
        return self._system.read(path)

    def write(self, path: str, text: str) -> None:
        """Writes a file; what it held before is lost.

        path: of the file
        text: all that it shall hold
        """
        if (problem := path_problem(path)) is not None:
            raise ToolError(problem)
        self._system.write(path, text)

    def replace(self, path: str, old: str, new: str) -> str:
        """Replaces every occurrence of a text in a file.

        path: of the file
        old: what to look for
        new: what to write instead
        """
        return self._system.replace(path, old, new)

    def line(self, number: int, text: str, path: str = "") -> None:
        """Replaces one line of a file; a text without indentation gets that of the old line.

        number: of the line, 1 is the first
        text: of the new line
        path: of the file; empty where there is only one
        """
        if not path and len(self._system.files) > 1:
            raise ToolError(f"there are {len(self._system.files)} files: say which, e.g. {min(self._system.files)}")
        path = path or next(iter(self._system.files), "")
        lines = self._system.read(path).split("\n")
        if not 1 <= number <= len(lines):
            raise ToolError(f"{path} has lines 1 to {len(lines)}")
        old = lines[number - 1]
        indentation = "" if text[:1].isspace() else old[: len(old) - len(old.lstrip())]
        lines[number - 1] = indentation + text
        self._system.write(path, "\n".join(lines))

    def _snapshot(self) -> dict[str, bytes]:
        return {path: as_bytes(text) for path, text in self._system.files.items()}

    def _shown(self, outcome: Outcome) -> str:
        """What a command printed, each stream cut in its middle: a failure is told at the end."""
        parts = [_cut(text.rstrip("\n"), self._characters // 2) for text in (outcome.stdout, outcome.stderr)]
        code = f"exit code {outcome.exit_code}" if outcome.exit_code else ""
        return "\n".join(part for part in (*parts, code) if part)


def _broken_limit(outcome: Outcome, limits: Limits, keep_bytes: int) -> str | None:
    reasons = {
        "timeout": f"the command used more than {limits.cpu_seconds:g} s of the processor, or slept as long",
        "memory": f"the command used more than {limits.memory_bytes >> 20} MiB",
        "output": f"the command printed more than {limits.output_bytes >> 10} KiB",
    }
    if outcome.status == "killed" and outcome.exit_code is None:
        return f"the command had more than {limits.processes} processes"
    if outcome.status in reasons:
        return reasons[outcome.status]
    return None if outcome.files is not None else f"the command left more than {keep_bytes >> 10} KiB of files"


def _cut(text: str, characters: int) -> str:
    half = characters // 2
    return text if len(text) <= characters else f"{text[:half]}\n... ({len(text) - 2 * half} cut)\n{text[-half:]}"


class ShellEnv(ToolEnv):
    """A shell, files to mend, and hidden tests that judge them when the episode is over (reward "code")."""

    def __init__(
        self,
        *,
        tools: list[Scalar] | None = None,
        seconds: float = 10.0,
        memory_mib: int = 256,
        processes: int = 32,
        max_calls: int = 24,
        call_format: str = "auto",
        show_tools: str = "auto",
    ) -> None:
        where = 'env "shell"'
        self._names = [str(name) for name in TOOLS] if tools is None else [str(name) for name in tools]
        for name in self._names:
            if name not in TOOLS:
                raise UserError(
                    f'{where}: tool "{name}" is unknown.{did_you_mean(name, TOOLS)} Known: {", ".join(TOOLS)}.'
                )
        if seconds <= 0 or memory_mib < 32 or processes < 1 or max_calls < 1 or not self._names:
            raise UserError(
                f"{where}: seconds={seconds} must be above 0, memory_mib={memory_mib} at least 32, "
                f"processes={processes} and max_calls={max_calls} at least 1, and tools name one of {', '.join(TOOLS)}."
            )
        if "run" in self._names:
            require_sandbox()
        self._command_limits = Limits(
            wall_seconds=PATIENCE * seconds,
            cpu_seconds=seconds,
            idle_seconds=seconds,
            memory_bytes=memory_mib << 20,
            processes=processes,
            file_bytes=DISK_BYTES,
        )
        # Words and lines that a small model was taught by heart stand without the marks of untrusted output.
        self._is_bare = call_format == "plain" and show_tools == "no"
        self._longest = QUEUE_SECONDS + PATIENCE * seconds + 30  # only a net: the sandbox keeps the real deadline
        super().__init__(
            self._open,
            limits=ToolLimits(
                calls_per_turn=max_calls, calls_per_episode=max_calls, total_seconds=self._longest * max_calls
            ),
            permissions=Permissions(effects=frozenset({"read", "write"})),
            presentation=Presentation(call_format=call_format, show_tools=show_tools, mark_untrusted=not self._is_bare),
        )

    async def step(self, message: Message) -> EnvReply:
        return dataclasses.replace(await super().step(message), result=self._workplace.changes())

    def solution(self, task: Task) -> Calls:
        """Writes the texts by path in the column "solution" with the tools that there are: line by line or whole."""
        before = {path: as_text(content) for path, content in read_repository(task).items()}
        after = read_solution(task)
        if not isinstance(after, dict) or not all(isinstance(text, str) for text in after.values()):
            return []
        lines = [_line_calls(path, before, text) for path, text in after.items()]
        if "line" in self._names and None not in lines:
            return [call for calls in lines for call in calls or ()]
        # A plain call stands on one line, which a file does not.
        is_writable = "write" in self._names and self._presentation.call_format != "plain"
        return [("write", {"path": path, "text": text}) for path, text in after.items()] if is_writable else []

    def _open(self, task: Task, seed: int) -> Iterable[Tool]:
        self._workplace = Workplace(task, self._command_limits, self._limits.observation_characters - 200)
        return [make_tool(getattr(self._workplace, n), effect=TOOLS[n], seconds=self._longest) for n in self._names]


def _line_calls(path: str, before: Mapping[str, str], text: str) -> Calls | None:
    """Calls of `line` that make a file hold this text; None where lines are to be added or taken away."""
    old, new = before.get(path, "").split("\n"), text.split("\n")
    if len(old) != len(new):
        return None
    place = {"path": path} if len(before) > 1 else {}
    pairs = enumerate(zip(old, new, strict=True), start=1)
    return [("line", {"number": number, "text": its, **place}) for number, (was, its) in pairs if was != its]


@lru_cache(maxsize=1)
def _shared_sandbox() -> Sandbox:
    """One pool for the process: environments come and go by the thousand, and share nothing in it but the queue."""
    sandbox = Sandbox(size=os.cpu_count() or 2, limits=Limits(file_bytes=DISK_BYTES), has_shell=True)
    atexit.register(sandbox.close)
    return sandbox
