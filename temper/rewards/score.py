"""How several verdicts become one without a failure turning into a number.

Owns: the rules of the tri-state, of weights, gates and bounds. Refuses: running rewards (rubric.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from temper.types import Score, ScoreKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What one part means for the whole."""

    weight: float = 1.0
    is_gate: bool = False
    """The whole is 0 unless this part is at least 1. A gate adds nothing itself."""
    clip: tuple[float, float] | None = None
    """Bounds of the part before weighting; None: as it is."""


def finite(score: Score) -> Score:
    """The score, or an error when its number is no number: one NaN reward would poison the advantages of its group."""
    if score.value is not None and not math.isfinite(score.value):
        return Score.error(f"the reward is {score.value}")
    return score


def combine(parts: Mapping[str, Score], rules: Mapping[str, Rule]) -> Score:
    """Weighted sum of the parts that have a value; 0 when a gate is closed.

    Any error makes an error: the sum without that part is another goal than the one asked for. A gate that could not be
    scored leaves the whole unscorable: it is neither open nor closed. Other unscorable parts are left out; when all
    are, so is the whole.
    """
    for name, score in parts.items():
        if score.kind is ScoreKind.ERROR:
            return Score.error(f"{name}: {score.reason}")
    for name, score in parts.items():
        if rules[name].is_gate and not score.is_value:
            return Score.unscorable(f"{name}: {score.reason}")
    if _has_closed_gate(parts, rules):
        return Score.of(0.0)
    values = [score.value for name, score in weigh(parts, rules).items() if not rules[name].is_gate]
    scored = [value for value in values if value is not None]
    if not scored:
        reasons = "; ".join(f"{name}: {score.reason}" for name, score in parts.items() if score.reason)
        return Score.unscorable(reasons or "there are no reward parts")
    return finite(Score.of(sum(scored)))


def weigh(parts: Mapping[str, Score], rules: Mapping[str, Rule]) -> dict[str, Score]:
    """What each part adds to the whole, after bounds, weight and gates. The values sum to the value of the whole."""
    is_closed = _has_closed_gate(parts, rules)
    return {
        name: score if score.value is None else Score.of(0.0 if is_closed else _weighted(score.value, rules[name]))
        for name, score in parts.items()
    }


def _weighted(value: float, rule: Rule) -> float:
    if rule.is_gate:
        return 0.0
    if rule.clip is not None:
        value = min(max(value, rule.clip[0]), rule.clip[1])
    return rule.weight * value


def _has_closed_gate(parts: Mapping[str, Score], rules: Mapping[str, Rule]) -> bool:
    return any(rules[name].is_gate and score.value is not None and score.value < 1.0 for name, score in parts.items())
