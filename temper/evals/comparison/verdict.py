"""What training did to a model, in a word with its evidence: sharpening, expansion, no change, regression or unknown.

pass@1 asks how often the model is right, pass@k at large k what it can reach at all. Training that only moves weight to
answers the model already found lifts the first and not the second.
Owns: the rule and its thresholds. Refuses: computing differences (compare.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

LEVEL = 0.025
"""Each of the two tests is done at this level, so that equal models are called changed at most 5% of the time."""
LARGE_K = 64
"""The k of the second test: this, or the largest power of two that there are samples for."""
MIN_LARGE_K = 16
"""With fewer samples pass@k is too near pass@1 to say what a model can reach."""
MIN_PROMPTS = 10
WIDEST_PASS_1 = 0.05
"""Half an interval wider than this hides a change worth having: then "no change" is not claimed."""
WIDEST_PASS_K = 0.10
CEILING = 0.98
"""A base model that reaches this share has no room to expand on this suite."""


class Kind(StrEnum):
    SHARPENING = "sharpening"
    EXPANSION = "expansion"
    NO_CHANGE = "no change"
    REGRESSION = "regression"
    UNKNOWN = "not enough samples to tell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One metric of two models on the same prompts."""

    name: str
    unit: str = "%"
    """"%": a share; otherwise what is counted, e.g. "tokens"."""
    base: float
    """Mean over prompts."""
    trained: float
    low: float
    """95% interval of trained - base, by bootstrap over prompts."""
    high: float
    p_value: float
    """Two-sided, of the hypothesis that on every prompt the two models are alike; by flipping signs of differences."""
    num_prompts: int
    """Prompts on which both have the metric."""

    @property
    def difference(self) -> float:
        return self.trained - self.base

    @property
    def direction(self) -> int:
        """1: up, -1: down, 0: neither is shown at LEVEL."""
        if self.p_value > LEVEL:
            return 0
        return 1 if self.difference > 0 else -1

    @property
    def half_width(self) -> float:
        """How far the difference is known. Not one of n prompts that differ still leaves room for 3 in n that do."""
        return (self.high - self.low) / 2 if self.high > self.low else 3 / self.num_prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    kind: Kind
    evidence: str
    """One sentence."""


def judge(pass_1: Difference, pass_k: Difference, k: int) -> Verdict:
    """The verdict, from pass@1 and pass@k at a large k (k = 1 when there is one sample each: then both are the same).

    pass@1 down: regression. pass@k up: expansion, also when pass@1 stays. pass@1 up and pass@k not up: sharpening.
    pass@1 the same and pass@k down: regression, for the model has lost answers. Otherwise no change, or unknown when
    the intervals are too wide, the prompts or samples too few.
    """
    seen = f"{_said(pass_1)}; {_said(pass_k)}" if k > 1 else _said(pass_1)
    seen = f"{seen}; {pass_1.num_prompts} prompts"
    kind, why = _kind(pass_1, pass_k, k)
    return Verdict(kind=kind, evidence=f"{why}: {seen}.")


def _kind(pass_1: Difference, pass_k: Difference, k: int) -> tuple[Kind, str]:
    if pass_1.num_prompts < MIN_PROMPTS:
        return Kind.UNKNOWN, f"fewer than {MIN_PROMPTS} prompts say nothing about others"
    if pass_1.direction < 0:
        return Kind.REGRESSION, "pass@1 fell" + _although(pass_k, k)
    if k < MIN_LARGE_K:
        if pass_1.direction > 0:
            return Kind.UNKNOWN, f"pass@1 rose, but what a model can reach needs {LARGE_K} samples of each prompt"
        return _flat(pass_1, pass_1, k)
    if pass_k.direction > 0:
        rose = "pass@1 and" if pass_1.direction > 0 else "pass@1 is not shown to move, but"
        return Kind.EXPANSION, f"{rose} pass@{k} rose"
    if pass_1.direction > 0:
        return _sharper(pass_k, k)
    if pass_k.direction < 0:
        return Kind.REGRESSION, f"pass@1 stayed and pass@{k} fell, so answers were lost"
    return _flat(pass_1, pass_k, k)


def _sharper(pass_k: Difference, k: int) -> tuple[Kind, str]:
    if pass_k.direction == 0 and pass_k.half_width > WIDEST_PASS_K:
        return Kind.UNKNOWN, f"pass@1 rose, but pass@{k} is only known within {pass_k.half_width:.0%}"
    if pass_k.base >= CEILING:
        return Kind.SHARPENING, f"pass@1 rose; pass@{k} had no room to rise"
    return Kind.SHARPENING, f"pass@1 rose and pass@{k} {'fell' if pass_k.direction < 0 else 'did not'}"


def _flat(pass_1: Difference, pass_k: Difference, k: int) -> tuple[Kind, str]:
    if pass_1.half_width > WIDEST_PASS_1:
        return Kind.UNKNOWN, f"no change is shown, but pass@1 is only known within {pass_1.half_width:.0%}"
    if k >= MIN_LARGE_K and pass_k.half_width > WIDEST_PASS_K:
        return Kind.UNKNOWN, f"no change is shown, but pass@{k} is only known within {pass_k.half_width:.0%}"
    return Kind.NO_CHANGE, "neither pass@1 nor pass@k moved" if k > 1 else "pass@1 did not move"


def _although(pass_k: Difference, k: int) -> str:
    return f", although pass@{k} rose" if k > 1 and pass_k.direction > 0 else ""


def _said(difference: Difference) -> str:
    return (
        f"{difference.name} {difference.base:.1%} to {difference.trained:.1%} "
        f"({100 * difference.difference:+.1f} points, {100 * difference.low:+.1f} to {100 * difference.high:+.1f}, "
        f"p = {difference.p_value:.2g})"
    )
