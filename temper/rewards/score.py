"""How several verdicts become one without a failure turning into a number.

Owns: the rules of the tri-state, of weights, gates and bounds, and what turns are paid. Refuses: running rewards
(composite.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from temper.types import Score, ScoreKind


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRule:
    """What one part means for the whole."""

    weight: float = 1.0
    is_gate: bool = False
    """The whole is 0 unless this part is at least 1. A gate adds nothing itself."""
    clip: tuple[float, float] | None = None
    """Bounds of the part before weighting; None: as it is."""
    is_optional: bool = False
    """Left out of the sum where it cannot be scored. Otherwise the whole cannot be scored either."""
    pays_turns: bool = False
    """The weight scales what the part pays the turns; to the whole it adds nothing."""

    @property
    def adds(self) -> bool:
        """Whether the part is a term of the whole."""
        return not (self.is_gate or self.pays_turns)


def finite(score: Score) -> Score:
    """The score, or an error when its number is not finite: one NaN reward would poison the advantages of its group."""
    if score.value is not None and not math.isfinite(score.value):
        return Score.error(f"the reward is {score.value}")
    return score


def combine(parts: Mapping[str, Score], rules: Mapping[str, PartRule]) -> Score:
    """Weighted sum of the parts that have a value; 0 when a gate is closed.

    Any error makes an error, and a part that could not be scored leaves the whole unscorable: the sum without it is
    another goal than the one asked for. Without its penalty a bad response would look like a good one, without what it
    is paid for a good one like a bad one. Two exceptions: a closed gate leaves nothing for the parts that add, scored
    or not; and parts that say so are optional and left out, unless no other has a value. What a verifier says of its
    number stays with the whole.
    """
    for name, score in parts.items():
        if score.kind is ScoreKind.ERROR:
            return Score.error(f"{name}: {score.reason}")
    for name, score in parts.items():
        if not rules[name].adds and not score.is_value:
            return Score.unscorable(f"{name}: {score.reason}")
    said = "; ".join(f"{name}: {score.reason}" for name, score in parts.items() if score.is_value and score.reason)
    if _has_closed_gate(parts, rules):
        return Score.of(0.0, said or None)
    values = {name: score.value for name, score in weigh(parts, rules).items() if rules[name].adds}
    scored = [value for value in values.values() if value is not None]
    missing = [name for name, value in values.items() if value is None and (not rules[name].is_optional or not scored)]
    if missing or not scored:
        reasons = "; ".join(f"{name}: {parts[name].reason}" for name in missing)
        return Score.unscorable(reasons or "there are no reward parts")
    return finite(Score.of(sum(scored), said or None))


def weigh(parts: Mapping[str, Score], rules: Mapping[str, PartRule]) -> dict[str, Score]:
    """What each part adds to the whole, after bounds, weight and gates. The values sum to the value of the whole."""
    is_closed = _has_closed_gate(parts, rules)
    return {
        name: score if score.value is None else Score.of(0.0 if is_closed else _weighted(score.value, rules[name]))
        for name, score in parts.items()
    }


def pay_turns(
    total: float,
    given: Sequence[float | None],
    paid: Mapping[str, Sequence[float | None]],
    parts: Mapping[str, Score],
    rules: Mapping[str, PartRule],
    last: int = -1,
) -> list[float]:
    """What each turn earned: by its environment, by the parts that pay turns, and the outcome at the end.

    `given` is by the environment, `paid` by those parts before weighting. The turn `last` gets what is left of the
    total after what the turns were given, so that they sum to the total and the weighted payments: an outcome is
    counted once, whether the environment paid it or a verifier found it. A closed gate leaves nothing of the payments.
    """
    if not given:
        return []
    earned = [reward or 0.0 for reward in given]
    earned[last] += total - sum(earned)
    if _has_closed_gate(parts, rules):
        return earned
    for name, rewards in paid.items():
        earned = [sofar + rules[name].weight * (reward or 0.0) for sofar, reward in zip(earned, rewards, strict=True)]
    return earned


def wrong_payment(turns: Sequence[float | None], num_turns: int) -> str | None:
    """What is wrong with payments, or None: one for each turn that there is, None for nothing, else a finite number."""
    if len(turns) != num_turns:
        return f"{len(turns)} payments for {num_turns} turns: pay each turn that there is, None for nothing"
    paid = ((turn, payment) for turn, payment in enumerate(turns) if payment is not None)
    return next((f"turn {turn} is paid {payment}" for turn, payment in paid if not math.isfinite(payment)), None)


def _weighted(value: float, rule: PartRule) -> float:
    if not rule.adds:
        return 0.0
    if rule.clip is not None:
        value = min(max(value, rule.clip[0]), rule.clip[1])
    return rule.weight * value


def _has_closed_gate(parts: Mapping[str, Score], rules: Mapping[str, PartRule]) -> bool:
    return any(rules[name].is_gate and score.value is not None and score.value < 1.0 for name, score in parts.items())
