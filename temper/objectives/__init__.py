"""Every algorithm as a point in one product space: advantage x ratio x gate x correction x weighting x regulariser.

Pure torch. `resolve("grpo")` gives an Objective; `advantages_of` makes credit; `objective_loss` makes the loss.
"""

from temper.objectives.advantage.credit import Advantages, Credit, Extent
from temper.objectives.combinations import check_objective
from temper.objectives.metrics import MetricSums
from temper.objectives.objective import (
    DirectLoss,
    Gain,
    Loss,
    Objective,
    PolicyObjective,
    RowKind,
    SlopedWeighting,
    advantages_of,
    control,
    measure_batch,
    measures_batch,
    objective_loss,
    targets_of,
)
from temper.objectives.presets.table import DIRECT_LOSSES, FAMILIES, POLICY_GRADIENTS, PRESETS
from temper.objectives.resolve import compare, describe, resolve
from temper.objectives.tokens import Scored, Tokens, TopTokens, join

__all__ = [
    "DIRECT_LOSSES",
    "FAMILIES",
    "POLICY_GRADIENTS",
    "PRESETS",
    "Advantages",
    "Credit",
    "DirectLoss",
    "Extent",
    "Gain",
    "Loss",
    "MetricSums",
    "Objective",
    "PolicyObjective",
    "RowKind",
    "Scored",
    "SlopedWeighting",
    "Tokens",
    "TopTokens",
    "advantages_of",
    "check_objective",
    "compare",
    "control",
    "describe",
    "join",
    "measure_batch",
    "measures_batch",
    "objective_loss",
    "resolve",
    "targets_of",
]
