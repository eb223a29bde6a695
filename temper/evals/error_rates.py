"""How often a verifier is wrong: false-positive and false-negative rates with 95% intervals.

Owns: counting verdicts against labels. Refuses: running verifiers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from temper.evals.passk import wilson


@dataclass(frozen=True, slots=True)
class Rate:
    """A share of things counted."""

    count: int
    total: int

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's, 95%; all of [0, 1] when nothing was counted."""
        return wilson(self.count, self.total) if self.total else (0.0, 1.0)

    def __str__(self) -> str:
        low, high = self.interval
        share = f"{self.count / self.total:.2%}" if self.total else "none"
        return f"{share} ({self.count} of {self.total}; 95% interval {low:.2%} to {high:.2%})"


def error_rates(pairs: Iterable[tuple[bool, bool]]) -> tuple[Rate, Rate]:
    """(false positives among the wrong, false negatives among the right) of (label, verdict) pairs."""
    labelled = list(pairs)
    wrong = [verdict for label, verdict in labelled if not label]
    right = [verdict for label, verdict in labelled if label]
    return Rate(sum(wrong), len(wrong)), Rate(len(right) - sum(right), len(right))
