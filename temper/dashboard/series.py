"""Curves for charts: at most so many points, and never without their peaks.

Owns: thinning, and the shape [{stage, steps, values}]. Refuses: smoothing; what is shown was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

MOST_POINTS = 1000
"""Most points of one metric, all its stages together."""

Point = tuple[int, int, float | None]
"""Stage, step, value; None: it was not a number."""


def thin(values: Sequence[float | None], most: int) -> list[int]:
    """Places to keep, in order: of every bucket the lowest and the highest value, and both ends of the curve. A bucket
    without any value keeps one place: a hole in the curve stays a hole."""
    if len(values) <= most:
        return list(range(len(values)))
    num_buckets = max(1, (most - 2) // 2)
    size = -(-len(values) // num_buckets)
    buckets = np.full((num_buckets, size), np.nan)
    buckets.reshape(-1)[: len(values)] = np.array(values, dtype=float)  # None becomes NaN
    starts = np.arange(num_buckets) * size
    lowest = starts + np.where(np.isnan(buckets), np.inf, buckets).argmin(axis=1)
    highest = starts + np.where(np.isnan(buckets), -np.inf, buckets).argmax(axis=1)
    kept = {0, len(values) - 1, *lowest.tolist(), *highest.tolist()}
    return sorted(place for place in kept if place < len(values))


def by_stage(points: Iterable[Point], most: int = MOST_POINTS) -> list[dict[str, Any]]:
    """Points of one metric, ordered by stage and step, as one thinned curve per stage."""
    stages: dict[int, tuple[list[int], list[float | None]]] = {}
    for stage, step, value in points:
        steps, values = stages.setdefault(stage, ([], []))
        steps.append(step)
        values.append(value)
    total = sum(len(steps) for steps, _ in stages.values())
    curves = []
    for stage, (steps, values) in stages.items():
        share = most if total <= most else max(4, most * len(steps) // total)
        kept = thin(values, share)
        curves.append({"stage": stage, "steps": [steps[k] for k in kept], "values": [values[k] for k in kept]})
    return curves


def together(parts: Mapping[str, Sequence[Point]], most: int = MOST_POINTS) -> dict[str, list[dict[str, Any]]]:
    """Parts of a whole, thinned to the same steps so that they can be stacked: those where the whole peaks."""
    totals: dict[tuple[int, int], float] = {}
    for points in parts.values():
        for stage, step, value in points:
            totals[stage, step] = totals.get((stage, step), 0.0) + (value or 0.0)
    curves = by_stage(((*place, total) for place, total in sorted(totals.items())), most)
    kept = {(curve["stage"], step) for curve in curves for step in curve["steps"]}
    return {name: by_stage(point for point in points if point[:2] in kept) for name, points in parts.items()}


Progress = tuple[int, int, int, int, float | None]
"""Stage, step, tokens drawn, tokens trained, seconds: of that step alone."""


def make_axes(rows: Iterable[Progress], most: int = MOST_POINTS) -> dict[str, dict[str, list[float]]]:
    """By stage, what had passed at the end of each step: {steps, drawn, trained, seconds}. Of a long stage every so
    many steps and the last: sums only grow, so a reader may draw a straight line between two of them."""
    stages: dict[int, list[tuple[float, ...]]] = {}
    for stage, step, drawn, trained, seconds in rows:
        passed = stages.setdefault(stage, [])
        before = passed[-1] if passed else (0, 0, 0, 0.0)
        passed.append((step, before[1] + drawn, before[2] + trained, before[3] + (seconds or 0.0)))
    axes = {}
    for stage, passed in stages.items():
        every = -(-len(passed) // most)
        kept = [row for place, row in enumerate(passed) if place % every == every - 1 or row is passed[-1]]
        columns = [list(column) for column in zip(*kept, strict=True)]
        axes[str(stage)] = dict(zip(("steps", "drawn", "trained", "seconds"), columns, strict=True))
    return axes
