"""The three ways Temper refuses, and what messages have in common: the nearest name, the line that installs.

Owns: exception types and their exit codes. Refuses: recovery; a caller at the rim turns these into a recorded status.
"""

from __future__ import annotations

import difflib
import errno
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path


class TemperError(Exception):
    """Root of what Temper raises on purpose. The command line prints the message without a traceback."""

    exit_code = 1


class UserError(TemperError):
    """Something the user wrote or provided is wrong: a key, a path, a row, a combination of settings."""

    exit_code = 2


class DiskFull(UserError):
    """A disk has no room for what is written; the text names the file. Who knows the run says what is kept of it
    (commands/training/stopping.py)."""


def is_disk_full(error: BaseException) -> bool:
    """Also where a library in Rust or C++, or another process, hides the number of the error in its text."""
    text = str(error)
    has_number = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, DiskFull) or has_number or "No space left" in text or "os error 28" in text


class TaskError(TemperError):
    """One task or episode failed. Recorded as that trajectory's status; never a reward, never the end of a run."""


class EnvironmentLost(TaskError):
    """The process that an episode lived in is gone, with whatever else lived there. The episode may be played anew."""

    def __init__(self, text: str, *, is_suspect: bool) -> None:
        """is_suspect: it had a call under way when the process ended, and so may be what ended it."""
        super().__init__(text)
        self.is_suspect = is_suspect


class ContextFull(TaskError):
    """The prompt leaves no room for an answer."""


class BackendError(TemperError):
    """An engine, trainer, verifier or store broke. The run stops and names the part."""

    exit_code = 3


class EngineLost(BackendError):
    """An engine whose processes are gone or silent: it will not draw again. A sampler process ends with it."""


class OutOfMemory(BackendError):
    """A GPU has no room for what is computed. Who knows the recipe says what to change (build/full.py)."""

    def __init__(self, phase: str, detail: object) -> None:
        super().__init__(f"out of memory in {phase}: {detail}")
        self.phase = phase
        """What was being computed."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' Did you mean "x"?' for the nearest known name, or '' when nothing is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f' Did you mean "{near[0]}"?' if near else ""


def nearest_file(path: Path) -> str:
    """' Did you mean "recipes/demo.toml"?' for the nearest name beside a file or folder that is not there, or ''."""
    if path.expanduser().exists():
        return ""
    if path.expanduser().parent.is_dir():
        near = nearest_path(path)
        return f' Did you mean "{near}"?' if near is not None else ""
    return f' There is no folder "{path.parent}".{nearest_file(path.parent)}'


def nearest_path(path: Path) -> Path | None:
    """What is there in the same folder under nearly the same name; None: nothing is."""
    folder = path.expanduser().parent
    near = difflib.get_close_matches(path.name, os.listdir(folder), n=1, cutoff=0.6) if folder.is_dir() else []
    return path.parent / near[0] if near else None


def install_line(extra: str) -> str:
    """A command that installs an extra into the environment that runs now, whether or not that is active in the shell.

    Of a clone it installs the clone, with the versions that were tested.
    """
    clone = Path(__file__).resolve().parent.parent
    if not (clone / "pyproject.toml").is_file():
        return f'{command_line("python")} -m pip install "temper-rl[{extra}]"'
    is_here = clone == Path.cwd()
    constraints = shlex.quote(str(Path("constraints.txt") if is_here else clone / "constraints.txt"))
    return f'{command_line("python")} -m pip install -c {constraints} -e "{"." if is_here else clone}[{extra}]"'


def command_line(program: str, *arguments: str) -> str:
    """The program of this environment and its arguments, as a shell needs them that may not have it active: by its name
    where that is found and is this one, else by its path, e.g. ".venv/bin/temper watch runs/demo"."""
    folder = Path(sys.executable).absolute().parent
    if not (folder / program).is_file():
        return command_line(Path(sys.executable).name, "-m", program, *arguments)
    found = next((Path(part) for part in os.get_exec_path() if (Path(part) / program).is_file()), None)
    if found is not None and found.absolute() == folder:
        return shlex.join([program, *arguments])
    is_below = folder.is_relative_to(Path.cwd())
    return shlex.join([str((folder.relative_to(Path.cwd()) if is_below else folder) / program), *arguments])
