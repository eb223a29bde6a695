"""Fork tokens: the positions of a trajectory where the policy is least sure what to write.

Owns: that definition. Refuses: what is done about them (ratios.py, emphasis.py).
Shapes: _T drawn tokens, _S trajectories.
"""

from __future__ import annotations

import torch
from torch import Tensor

from temper.objectives.factor import require
from temper.objectives.tokens import Tokens


def fork_tokens(tokens: Tokens, quantile: float) -> Tensor:
    """[T] True where the entropy exceeds the `quantile` of the entropies of its own trajectory.

    A trajectory of one token, or of equal entropies, has no fork. SimKO, arXiv 2510.14807.
    """
    assert tokens.entropy is not None, "fork tokens need the entropy of each position"
    entropy_T = tokens.entropy.detach().double()
    return entropy_T > quantile_by_trajectory(tokens, entropy_T, quantile)[tokens.trajectory_ids]


def quantile_by_trajectory(tokens: Tokens, values_T: Tensor, quantile: float) -> Tensor:
    """[S] as torch.quantile with linear interpolation, for all trajectories at once; 0 for those without tokens."""
    if len(values_T) == 0:
        return values_T.new_zeros(tokens.num_trajectories)
    # Sorted by value first: the second sort is stable and keeps that order inside each trajectory.
    order_T = values_T.argsort()
    order_T = order_T[tokens.trajectory_ids[order_T].argsort(stable=True)]
    sorted_T = values_T[order_T]
    counts_S = tokens.sum_by_trajectory(torch.ones_like(values_T)).long()
    first_S = counts_S.cumsum(0) - counts_S
    place_S = (counts_S - 1).clamp(min=0).double() * quantile
    last_place = len(sorted_T) - 1
    below_S = sorted_T[(first_S + place_S.floor().long()).clamp(max=last_place)]
    above_S = sorted_T[(first_S + place_S.ceil().long()).clamp(max=last_place)]
    return torch.where(counts_S > 0, torch.lerp(below_S, above_S, place_S.frac().to(values_T.dtype)), 0.0)


def require_quantile(name: str, quantile: float) -> None:
    require(0 <= quantile < 1, f"{name}: quantile={quantile} must be at least 0 and below 1, e.g. quantile=0.8")
