"""How several verdicts become one without a failure turning into a number.

Owns: the rules of the tri-state. Refuses: running rewards (rubric.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from temper.types import Score, ScoreKind


def finite(score: Score) -> Score:
    """The score, or an error when its number is no number: one NaN reward would poison the advantages of its group."""
    if score.value is not None and not math.isfinite(score.value):
        return Score.error(f"the reward is {score.value}")
    return score


def combine(parts: Mapping[str, Score], weights: Mapping[str, float]) -> Score:
    """Weighted sum of the parts that have a value.

    Any error makes an error: the sum without that part is another goal than the one asked for. Unscorable parts are
    left out; when all are, so is the whole.
    """
    for name, score in parts.items():
        if score.kind is ScoreKind.ERROR:
            return Score.error(f"{name}: {score.reason}")
    values = {name: score.value for name, score in parts.items() if score.value is not None}
    if not values:
        reasons = "; ".join(f"{name}: {score.reason}" for name, score in parts.items())
        return Score.unscorable(reasons or "there are no reward parts")
    return finite(Score.of(sum(weights[name] * value for name, value in values.items())))
