"""Metrics that are not means: formed once microbatches and ranks have been added up.

Owns: the list of them. Each takes the finished metrics and returns them with its figure, unchanged when its parts are
not there. Refuses: sums (metrics.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from temper.objectives.losses.preferences import correlated
from temper.objectives.losses.reward_models import calibration_error


def calibrated(metrics: Mapping[str, float]) -> dict[str, float]:
    """With reward_model/calibration_error in place of the thirty numbers that it is made of."""
    others = {name: value for name, value in metrics.items() if not name.startswith("calibration/")}
    if len(others) == len(metrics):
        return others
    return {**others, "reward_model/calibration_error": calibration_error(metrics)}


def perplexed(metrics: Mapping[str, float]) -> dict[str, float]:
    if "sft/nll" not in metrics:
        return dict(metrics)
    return {**metrics, "sft/perplexity": math.exp(min(metrics["sft/nll"], 700.0))}


FINISHERS: tuple[Callable[[Mapping[str, float]], dict[str, float]], ...] = (correlated, calibrated, perplexed)


def finished(metrics: Mapping[str, float]) -> dict[str, float]:
    complete = dict(metrics)
    for finish in FINISHERS:
        complete = finish(complete)
    return complete
