"""Every loss that is not a policy gradient, by name, and the stages that may train with it.

Owns: the two tables. Refuses: the losses themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from temper.objectives.losses.divergences import DIVERGENCE_LOSSES
from temper.objectives.losses.likelihood import LIKELIHOOD_LOSSES
from temper.objectives.losses.pairs import PAIR_LOSSES
from temper.objectives.losses.scores import SCORE_LOSSES
from temper.objectives.objective import DirectLoss

LOSSES: dict[str, Callable[..., DirectLoss]] = {
    **LIKELIHOOD_LOSSES,
    **PAIR_LOSSES,
    **SCORE_LOSSES,
    **DIVERGENCE_LOSSES,
}

WEIGHED_LOSSES = frozenset({*LIKELIHOOD_LOSSES, *DIVERGENCE_LOSSES})
"""Losses whose tokens have the weights of the objective's weighting; pairs and scores all count the same."""

LOSSES_OF: Mapping[str, tuple[str | None, ...]] = {
    "rl": (None,),
    "rejection": (None,),
    "sft": tuple(LIKELIHOOD_LOSSES),
    "preference": tuple(PAIR_LOSSES),
    "reward_model": tuple(SCORE_LOSSES),
    "distill": (None, *DIVERGENCE_LOSSES),
}
"""Losses that each kind of stage may train with; None is the policy gradient."""


def stages_for(direct_loss: str) -> tuple[str, ...]:
    """Kinds of stage that may train with it."""
    return tuple(stage for stage, losses in LOSSES_OF.items() if direct_loss in losses)
