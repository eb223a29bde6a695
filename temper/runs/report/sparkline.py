"""A curve in one line of text. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None], width: int = 40) -> str:
    """One character per bucket of values, scaled to their own range; a gap where nothing is known."""
    known = [None if value is None or not math.isfinite(value) else value for value in values]
    buckets = [_mean(bucket) for bucket in _split(known, width)]
    finite = [value for value in buckets if value is not None]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    return "".join(" " if value is None else _bar(value, low, span) for value in buckets)


def _bar(value: float, low: float, span: float) -> str:
    return BARS[len(BARS) // 2 - 1] if span == 0 else BARS[round((value - low) / span * (len(BARS) - 1))]


def _split(values: Sequence[float | None], width: int) -> list[Sequence[float | None]]:
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)] if count else [0]
    return [values[a:b] for a, b in pairwise(edges)]


def _mean(values: Sequence[float | None]) -> float | None:
    finite = [value for value in values if value is not None]
    return fmean(finite) if finite else None
