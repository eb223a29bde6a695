"""Every algorithm as a point in one product space: advantage x ratio x gate x correction x weighting x regulariser.

Pure torch. `resolve("grpo")` gives an Objective; `advantages_of` makes credit; `objective_loss` makes the loss.
"""

from temper.objectives.metrics import MetricSums
from temper.objectives.objective import Credit, Gain, Objective, Tokens, advantages_of, objective_loss
from temper.objectives.presets import PRESETS
from temper.objectives.resolve import check_group_size, check_proximal, compare, describe, resolve

__all__ = [
    "PRESETS",
    "Credit",
    "Gain",
    "MetricSums",
    "Objective",
    "Tokens",
    "advantages_of",
    "check_group_size",
    "check_proximal",
    "compare",
    "describe",
    "objective_loss",
    "resolve",
]
