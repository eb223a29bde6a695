"""What a run notes beside its steps: transcripts put aside for people to read, and alarms.

Owns: two records that are written (store.py) and come back (reader.py) as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from temper.types import Message

AuditKind = Literal["top", "random"]
AlarmLevel = Literal["note", "warn", "pause", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """One held-out transcript, kept because its reward was among the highest or because chance chose it."""

    stage: int
    step: int
    evaluation: str
    """Name of the evaluation it belongs to."""
    kind: AuditKind
    place: int
    """From 0 inside its kind; the highest reward first."""
    task_id: str
    prompt: tuple[Message, ...]
    text: str
    """Untrusted: whoever shows it escapes it."""
    reward: float | None
    """By the training reward; None: it could not score it."""
    heldout: float | None
    """By the held-out verifier, which is the training reward unless the recipe names another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmRecord:
    """A rule that fired. One rule fires at most once a step."""

    stage: int
    step: int
    time: float
    """Seconds since 1970."""
    rule: str
    level: AlarmLevel
    value: float | None
    """What was measured; None: it was not a number."""
    text: str
    """What the rule saw."""
    meaning: str
    """What that usually means."""
    advice: str
    """What to try."""
