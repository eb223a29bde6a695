"""Credit: how much better than expected a trajectory was. Runs once per batch, on the CPU, in float64.

Owns: baselines and their normalisation. Refuses: reward terms (shaping.py), denominators (weighting.py).
Shapes: _B scored trajectories of the batch, _G its groups.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from temper.objectives.factor import factor, require
from temper.objectives.objective import Advantage, Credit

AdvantageFn = Callable[[Credit], Tensor]


@factor()
def raw() -> AdvantageFn:
    """A = R. Unbiased, high variance. Williams 1992. Specification 1.2."""
    return lambda credit: credit.rewards.clone()


@factor(min_group=2)
def group_mean() -> AdvantageFn:
    """A = R - mean(R) over the group. Its expected gradient is (G-1)/G of the true one.

    Dr. GRPO, Liu et al. 2025. Specification 1.2.
    """
    return _centred


@factor(min_group=2)
def group_mean_std(eps: float = 1e-6) -> AdvantageFn:
    """A = (R - mean(R)) / (std(R) + eps) over the group, std unbiased.

    Small std amplifies both very easy and very hard tasks. Shao et al. 2024 (GRPO). Specification 1.2.
    """
    require(eps >= 0, f"group_mean_std: eps={eps} must not be negative, e.g. 1e-6")

    def advantage(credit: Credit) -> Tensor:
        centred_B = _centred(credit)
        variance_B = _group_sum(centred_B.square(), credit) / (_group_size(credit) - 1).clamp(min=1)
        return _where_signal(credit, centred_B / (variance_B.sqrt() + eps))

    return advantage


@factor(min_group=2)
def leave_one_out() -> AdvantageFn:
    """A_i = R_i - mean of the other members = G/(G-1) (R_i - mean(R)). Unbiased.

    RLOO, Kool et al. 2019; Ahmadian et al. 2024. Specification 1.2.
    """

    def advantage(credit: Credit) -> Tensor:
        size_B = _group_size(credit)
        return _where_signal(credit, _centred(credit) * size_B / (size_B - 1).clamp(min=1))

    return advantage


@factor(min_group=2)
def batch_std(eps: float = 1e-6) -> AdvantageFn:
    """A = (R - mean(R) of the group) / (std of all rewards of the batch + eps), std unbiased.

    Keeps the relative size of easy and hard groups. ScaleRL, Khatri et al. 2025. Specification 1.2.
    """
    require(eps >= 0, f"batch_std: eps={eps} must not be negative, e.g. 1e-6")

    def advantage(credit: Credit) -> Tensor:
        scale = credit.rewards.std() if len(credit.rewards) > 1 else credit.rewards.new_ones(())
        return _where_signal(credit, _centred(credit) / (scale + eps))

    return advantage


def _centred(credit: Credit) -> Tensor:
    mean_B = _group_sum(credit.rewards, credit) / _group_size(credit)
    return _where_signal(credit, credit.rewards - mean_B)


def _where_signal(credit: Credit, advantages_B: Tensor) -> Tensor:
    """Exactly 0 in groups without reward variance.

    Not left to 0 / (0 + eps): seven float32 rewards of 0.1 have a std of 8e-9 and would get advantages of 0.0074.
    """
    high_B = _group_extreme(credit.rewards, credit)
    low_B = -_group_extreme(-credit.rewards, credit)
    size_B = torch.maximum(high_B.abs(), low_B.abs()).clamp(min=1.0)
    return torch.where(high_B - low_B > 1e-8 * size_B, advantages_B, torch.zeros_like(advantages_B))


def _group_sum(values_B: Tensor, credit: Credit) -> Tensor:
    """Sum over each member's group."""
    sums_G = values_B.new_zeros(_num_groups(credit)).index_add(0, credit.group_ids, values_B)
    return sums_G[credit.group_ids]


def _group_size(credit: Credit) -> Tensor:
    return _group_sum(torch.ones_like(credit.rewards), credit)


def _group_extreme(values_B: Tensor, credit: Credit) -> Tensor:
    start_G = values_B.new_full((_num_groups(credit),), -float("inf"))
    return start_G.scatter_reduce(0, credit.group_ids, values_B, "amax")[credit.group_ids]


def _num_groups(credit: Credit) -> int:
    return int(credit.group_ids.max()) + 1 if len(credit.group_ids) else 0


ADVANTAGES: dict[str, Callable[..., Advantage]] = {
    "raw": raw,
    "group_mean": group_mean,
    "group_mean_std": group_mean_std,
    "leave_one_out": leave_one_out,
    "batch_std": batch_std,
}
