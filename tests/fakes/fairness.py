"""Whether prompts are trained as often as each other, by Pearson's chi-square."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

TASKS = 20
"""Prompts of an epoch."""
UNFAIR = 43.8
"""0.1% of fair samples are above this, with 19 degrees of freedom."""


def chi_square(counts: Counter[int], tasks: Sequence[int]) -> float:
    """Of counts against equal ones."""
    expected = sum(counts.values()) / len(tasks)
    return sum((counts[task] - expected) ** 2 / expected for task in tasks)
