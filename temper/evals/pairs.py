"""How well scores tell the better of two answers, or good steps from bad ones, and how far they may be believed.

Owns: accuracy with an interval, ten bins of reliability, one evaluation result from them. Refuses: computing scores; a
reward model's, a policy's implicit ones and a process reward model's are judged alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, stdev

import torch

from temper.evals.passk import clustered_interval, wilson
from temper.objectives.losses.reward_models import NUM_BINS, calibration_error, pair_sums, step_sums
from temper.types import EvaluationResult, Scalar

Columns = Sequence[Sequence[float]]
"""One list per row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Predictions of one tenth of the range."""

    predicted: float
    """Their mean."""
    happened: float
    """How often they came true; the same number when calibrated."""
    share: float
    """Share of all predictions that are in this bin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """What scores are worth on examples whose answer is known."""

    accuracy: float
    low: float
    high: float
    """95% interval, by example: steps of one solution resemble each other."""
    num_examples: int
    guess: float
    """Accuracy of always saying the commoner thing."""
    calibration_error: float
    """Mean distance between what is predicted and how often it happens."""
    bins: tuple[Bin | None, ...]
    """By tenth of the predicted probability; None where nothing was predicted."""
    score_mean: float
    score_std: float
    """NaN when there is a single score."""
    margin: float | None = None
    """Mean of chosen minus rejected; None for steps."""

    def as_json(self) -> dict[str, object]:
        row = asdict(self)
        return row | {"score_std": None if math.isnan(self.score_std) else self.score_std}

    def table(self) -> str:
        """For people: the headline, then one line per bin."""
        lines = [
            f"accuracy {self.accuracy:.1%} ({self.low:.1%} to {self.high:.1%}, guessing {self.guess:.1%}) on "
            f"{self.num_examples} examples; calibration error {self.calibration_error:.3f}",
            "predicted   happened   share",
        ]
        lines += [f"{one.predicted:9.3f}  {one.happened:9.3f}  {one.share:6.1%}" for one in self.bins if one]
        return "\n".join(lines)


def judge_pairs(chosen: Sequence[float], rejected: Sequence[float]) -> Reliability:
    """Scores of both sides of every pair; equal ones count as half right."""
    assert len(chosen) == len(rejected) > 0, "a pair has two scores, and there is at least one"
    finished = pair_sums(*torch.tensor([chosen, rejected], dtype=torch.float64)).finish()
    accuracy = finished["reward_model/accuracy"]
    # Wilson's, also with ties: by the spread, a model that says 0 to everything would be half right for certain.
    bounds = wilson(accuracy * len(chosen), len(chosen))
    known = _reliability((accuracy, *bounds), finished, [*chosen, *rejected], num_examples=len(chosen), guess=0.5)
    return replace(known, margin=finished["reward_model/margin"])


def judge_steps(logits: Columns, labels: Columns) -> Reliability:
    """Logits and labels of the labelled steps of every solution."""
    said, true = (torch.tensor([x for row in rows for x in row], dtype=torch.float64) for rows in (logits, labels))
    assert len(said) == len(true) > 0, "every logit has a label, and there is at least one"
    right = [
        [float((logit > 0) == (label == 1)) for logit, label in zip(*solution, strict=True)]
        for solution in zip(logits, labels, strict=True)
    ]
    good = true.mean().item()
    finished = step_sums(said, true).finish()
    return _reliability(
        clustered_interval(right), finished, said.tolist(), num_examples=len(logits), guess=max(good, 1 - good)
    )


def _reliability(
    interval: tuple[float, float, float],
    finished: Mapping[str, float],
    scores: Sequence[float],
    *,
    num_examples: int,
    guess: float,
) -> Reliability:
    accuracy, low, high = interval
    return Reliability(
        accuracy=accuracy,
        low=low,
        high=high,
        num_examples=num_examples,
        guess=guess,
        calibration_error=calibration_error(finished),
        bins=tuple(_bin(finished, place) for place in range(NUM_BINS)),
        score_mean=fmean(scores),
        score_std=stdev(scores) if len(scores) > 1 else math.nan,
    )


def _bin(finished: Mapping[str, float], place: int) -> Bin | None:
    share = finished[f"calibration/{place}/share"]
    if not share:
        return None
    predicted, happened = (finished[f"calibration/{place}/{name}"] for name in ("predicted", "happened"))
    return Bin(predicted=predicted, happened=happened, share=share)


def pair_results(
    chosen: Sequence[float],
    rejected: Sequence[float],
    *,
    stage: int,
    step: int,
    name: str = "pairs",
    budget: Mapping[str, Scalar] | None = None,
) -> EvaluationResult:
    """Held-out pairs as a score of a run: the share in which the chosen side scores higher."""
    return result_of(judge_pairs(chosen, rejected), stage=stage, step=step, name=name, budget=budget)


def result_of(
    reliability: Reliability, *, stage: int, step: int, name: str, budget: Mapping[str, Scalar] | None = None
) -> EvaluationResult:
    """`budget`: what makes two results comparable, e.g. a hash of the examples."""
    details: dict[str, float | Mapping[str, float]] = {
        "calibration_error": reliability.calibration_error,
        "score_mean": reliability.score_mean,
    }
    if reliability.margin is not None:
        details["margin"] = reliability.margin
    if not math.isnan(reliability.score_std):
        details["score_std"] = reliability.score_std
    for place, one in enumerate(reliability.bins):
        if one is not None:
            details[f"calibration/{place}"] = asdict(one)
    return EvaluationResult(
        stage=stage,
        step=step,
        name=name,
        score=reliability.accuracy,
        low=reliability.low,
        high=reliability.high,
        num_prompts=reliability.num_examples,
        samples_per_prompt=1,
        constant_score=reliability.guess,
        budget=dict(budget or {}),
        details=details,
    )
