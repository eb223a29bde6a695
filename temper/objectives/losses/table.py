"""Every loss that is not a policy gradient, by name.

Owns: the table. Refuses: the losses themselves.
"""

from __future__ import annotations

from collections.abc import Callable

from temper.objectives.losses.divergences import DIVERGENCE_LOSSES
from temper.objectives.losses.likelihood import LIKELIHOOD_LOSSES
from temper.objectives.losses.pairs import PAIR_LOSSES
from temper.objectives.losses.scores import SCORE_LOSSES
from temper.objectives.objective import Loss

LOSSES: dict[str, Callable[..., Loss]] = {
    **LIKELIHOOD_LOSSES,
    **PAIR_LOSSES,
    **SCORE_LOSSES,
    **DIVERGENCE_LOSSES,
}
