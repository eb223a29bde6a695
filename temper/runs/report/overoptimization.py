"""Reward that is trained on against a verifier that training never sees, over the distance from the reference.

Owns: the points and their picture. Refuses: runs without a verifier of their own in evaluations.
Gao et al. 2022, arXiv 2210.10760, draw the same over the square root of KL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from temper.errors import UserError
from temper.runs.reader import RunReader
from temper.runs.report.plot import Line, Panel, chart

DISTANCE, MOVED = "policy/kl_ref_sequence", "policy/reference_moved"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyPoint:
    """One evaluation, scored by both on the same attempts."""

    stage: int
    step: int
    proxy: float
    """Mean training reward."""
    gold: float
    """Score of the held-out verifier, with its 95% interval."""
    low: float
    high: float
    distance: float | None
    """KL from the reference, nats a response, in the training step before; None: not measured."""


def proxy_points(run: Path) -> list[ProxyPoint]:
    """Of the last stage that has any, in order; the sampled score where there are several."""
    with RunReader(run) as reader:
        both = [result for result in reader.evaluations() if "proxy_gap" in result.details]
        if not both:
            raise UserError(
                f"{run}: no evaluation has a verifier of its own, so reward and score cannot part. Name one that "
                "training never sees under [[evaluation.reward]]"
            )
        stage, name = both[-1].stage, both[-1].name
        has_fixed_reference = not any(point.value for point in reader.metric(MOVED) if point.stage == stage)
        known = {point.step: point.value for point in reader.metric(DISTANCE) if point.stage == stage}
    distances = {0: 0.0, **known} if known and has_fixed_reference else {}
    points = []
    for result in both:
        if (result.stage, result.name) == (stage, name):
            proxy = result.details["reward_mean"]
            assert isinstance(proxy, float), "a mean is a number"
            points.append(
                ProxyPoint(
                    stage=stage,
                    step=result.step,
                    proxy=proxy,
                    gold=result.score,
                    low=result.low,
                    high=result.high,
                    distance=distances.get(result.step),
                )
            )
    return points


def describe_points(points: list[ProxyPoint]) -> str:
    """Whether the two have parted, in one sentence."""
    best, last = max(points, key=lambda point: point.gold), points[-1]
    rose = last.proxy - best.proxy
    if last.gold >= best.low or rose <= 0:
        return f"the held-out verifier says {last.gold:.3f}, the training reward {last.proxy:.3f}: they have not parted"
    return (
        f"over-optimised: after step {best.step} the training reward rose by {rose:.3f} to {last.proxy:.3f} while the "
        f"held-out verifier fell from {best.gold:.3f} to {last.gold:.3f}. Take that checkpoint, or bound the distance"
    )


def draw_points(points: list[ProxyPoint]) -> str:
    """SVG, over the square root of KL where every point has one, else over steps."""
    by_distance = all(point.distance is not None for point in points)
    ordered = sorted(points, key=_root) if by_distance else points
    xs = [_root(point) if by_distance else float(point.step) for point in ordered]
    lines = [
        Line(label="training reward", xs=xs, ys=[point.proxy for point in ordered], is_dashed=True),
        Line(
            label="held-out verifier", xs=xs, ys=[point.gold for point in ordered], low=[p.low for p in ordered],
            high=[point.high for point in ordered],
        ),
    ]  # fmt: skip
    label = "square root of KL from the reference, nats a response" if by_distance else "step"
    return chart([Panel(title="reward and held-out score", lines=lines, x_label=label)], width=560, height=340)


def _root(point: ProxyPoint) -> float:
    """Estimates of KL may be a little below 0."""
    return math.sqrt(max(0.0, point.distance or 0.0))
