"""The three ways Temper refuses, and the helper that suggests the nearest name.

Owns: exception types and their exit codes. Refuses: recovery; a caller at the rim turns these into a recorded status.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TemperError(Exception):
    """Root of what Temper raises on purpose. The command line prints the message without a traceback."""

    exit_code = 1


class UserError(TemperError):
    """Something the user wrote or provided is wrong: a key, a path, a row, a combination of settings."""

    exit_code = 2


class TaskError(TemperError):
    """One task or episode failed. Recorded as that trajectory's status; never a reward, never the end of a run."""


class ContextFull(TaskError):
    """The prompt leaves no room for an answer."""


class BackendError(TemperError):
    """An engine, trainer, verifier or store broke. The run stops and names the part."""

    exit_code = 3


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' Did you mean "x"?' for the nearest known name, or '' when nothing is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f' Did you mean "{near[0]}"?' if near else ""
