"""Verdicts on what was rolled out: a number only where one was computed.

Owns: Score and its kinds. Refuses: a failure that looks like a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ScoreKind(StrEnum):
    VALUE = "value"
    UNSCORABLE = "unscorable"
    """The verifier worked and found nothing to judge by, e.g. a judge that would not answer. Left out of all means."""
    ERROR = "error"
    """The verifier failed: time-out, crash, malformed gold answer. Counted by reason; too many stop the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A verdict that cannot lie: a number only when one was really computed."""

    kind: ScoreKind
    value: float | None = None
    """The number, exactly when kind is VALUE."""
    reason: str | None = None
    """Why there is no number; beside a number, what the verifier says of it, or None."""

    def __post_init__(self) -> None:
        has_value = self.kind is ScoreKind.VALUE
        assert (self.value is not None) == has_value, "a score has a value exactly when its kind is VALUE"
        assert has_value or self.reason is not None, "a score without a value says why"

    @staticmethod
    def of(value: float, reason: str | None = None) -> Score:
        return Score(kind=ScoreKind.VALUE, value=float(value), reason=reason)

    @staticmethod
    def unscorable(reason: str) -> Score:
        return Score(kind=ScoreKind.UNSCORABLE, reason=reason)

    @staticmethod
    def error(reason: str) -> Score:
        return Score(kind=ScoreKind.ERROR, reason=reason)

    @property
    def is_value(self) -> bool:
        return self.kind is ScoreKind.VALUE
