"""What goes into a sandbox and what comes out.

Owns: Program, Command, Limits, Outcome. Refuses: file names that point outside the program's own folder, limits below
one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import PurePosixPath
from typing import Any, Literal

from temper.errors import TaskError, UserError

MAX_FILES = 1024
"""Most files, and most folders, that are handed back."""
Status = Literal["ok", "error", "timeout", "memory", "output", "killed"]


class SandboxFailed(TaskError):
    """The boundary itself broke, so nothing is known about the program. Never an outcome, never a number."""


@dataclass(frozen=True)
class Limits:
    """What one program may use. Enforced from outside the sandbox; going over ends the whole sandbox."""

    wall_seconds: float = 5.0
    cpu_seconds: float = 5.0
    """Processor time of all its processes together."""
    idle_seconds: float = math.inf
    """Time in which none of its processes wanted the processor: asleep, or waiting for each other."""
    memory_bytes: int = 256 << 20
    """Memory of all its processes together."""
    processes: int = 16
    """Processes and threads alive at the same time, the program itself included."""
    output_bytes: int = 64 << 10
    """Size of stdout and stderr together."""
    file_bytes: int = 16 << 20
    """Size of everything in its folder and /tmp together, the program's own files included; also of /dev/shm."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if not value > 0:
                raise UserError(f"sandbox limit {limit.name}={value} must be above 0")


@dataclass(frozen=True)
class Program:
    """Python source, run as main.py in an empty writable folder: `Program("print(input())", stdin="hello")`."""

    source: str
    stdin: str = ""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Relative path -> text, written beside main.py before it starts."""
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.files:
            if not is_inside(name) or name == "main.py":
                raise UserError(
                    f"program file {name!r} is not allowed. Use a relative path without '..' that is not main.py"
                )

    def as_job(self) -> dict[str, Any]:
        """For the supervisor inside."""
        return {
            "source": _encode(self.source),
            "stdin": _encode(self.stdin),
            "files": {name: _encode(content) for name, content in {**self.files, "main.py": self.source}.items()},
            "arguments": self.arguments,
            "keep_bytes": 0,
        }


@dataclass(frozen=True)
class Command:
    """A line for the shell, run in a folder with these files and nothing else: `Command("wc -l *", {"a": b"1\\n"})`.

    What the folder holds when it has ended is the outcome's `files`. Needs a Sandbox with has_shell=True.
    """

    line: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    keep_bytes: int = 1 << 20
    """Most bytes that all files together may have at the end, their names included; with more there are none."""

    def __post_init__(self) -> None:
        for name in self.files:
            if not is_inside(name):
                raise UserError(f"file {name!r} is not allowed. Use a relative path without '..'")

    def as_job(self) -> dict[str, Any]:
        return {
            "source": b"import os, sys\nos.execv('/bin/sh', ['sh', '-c', sys.argv[1]])",
            "stdin": b"",
            "files": dict(self.files),
            "arguments": (self.line,),
            "keep_bytes": self.keep_bytes,
        }


def is_inside(name: str) -> bool:
    """Whether a file of that name lies in the program's own folder."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and bool(path.parts) and "\0" not in name


def _encode(content: str | bytes) -> bytes:
    # surrogatepass: text that is not valid Unicode is the program's error, to be found by its interpreter.
    return content if isinstance(content, bytes) else content.encode(errors="surrogatepass")


@dataclass(frozen=True)
class Outcome:
    """How a program ended, as seen from outside the sandbox."""

    status: Status
    """ok: exit 0. error: another exit code. timeout, memory, output: over that limit. killed: died of a signal."""
    exit_code: int | None
    """Negative: the signal it died of. None: it was stopped before it ended by itself."""
    stdout: str
    stderr: str
    seconds: float
    cpu_seconds: float = 0.0
    """Processor time of all its processes together, as last counted."""
    is_starved: bool = False
    """A timeout at wall_seconds of a program that had neither used cpu_seconds nor been idle for idle_seconds: the
    machine had no time for it, which says nothing about the program."""
    files: Mapping[str, bytes] | None = None
    """Of a Command that ended by itself: the regular files of its folder, after all its processes were killed. None:
    they were more than keep_bytes or MAX_FILES, or it was stopped."""
