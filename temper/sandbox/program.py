"""What goes into a sandbox and what comes out.

Owns: Program, Limits, Outcome. Refuses: file names that point outside the program's own folder, limits below one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import PurePosixPath
from typing import Literal

from temper.errors import TaskError, UserError

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
    files: Mapping[str, str] = field(default_factory=dict)
    """Relative path -> text, written beside main.py before it starts."""
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name or name == "main.py":
                raise UserError(
                    f"program file {name!r} is not allowed. Use a relative path without '..' that is not main.py"
                )


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
