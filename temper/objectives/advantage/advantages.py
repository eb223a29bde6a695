"""Credit: how much better than expected a trajectory was. Runs once per batch, on the CPU, in float64.

Owns: baselines that give a trajectory one number. Refuses: reward terms (shaping.py), credit inside a trajectory
(token_advantages.py), denominators (weighting.py).
Shapes: _B scored trajectories of the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from temper.errors import UserError
from temper.objectives.advantage.credit import Credit
from temper.objectives.factor import factor, require
from temper.objectives.objective import Advantage

AdvantageFn = Callable[[Credit], Tensor]


@factor()
def raw() -> AdvantageFn:
    """A = R. Unbiased, high variance. Williams 1992."""
    return returns_of


@factor(min_group=2)
def group_mean() -> AdvantageFn:
    """A = R - mean(R) over the group. Its expected gradient is (G-1)/G of the true one.

    Dr. GRPO, Liu et al. 2025.
    """
    return lambda credit: _centred(returns_of(credit), credit.group_ids)


@factor(min_group=2)
def group_mean_std(eps: float = 1e-6) -> AdvantageFn:
    """A = (R - mean(R)) / (std(R) + eps) over the group, std unbiased.

    Small std amplifies both very easy and very hard tasks: three samples of success rate 0.3 give 1.154701 of the true
    gradient. Shao et al. 2024 (GRPO).
    """
    require(eps >= 0, f"group_mean_std: eps={eps} must not be negative, e.g. 1e-6")
    return lambda credit: _standardised(returns_of(credit), credit.group_ids, eps)


@factor(min_group=2)
def leave_one_out() -> AdvantageFn:
    """A_i = R_i - mean of the other members = G/(G-1) (R_i - mean(R)). Unbiased.

    RLOO, Kool et al. 2019; Ahmadian et al. 2024.
    """

    def advantage(credit: Credit) -> Tensor:
        returns_B = returns_of(credit)
        size_B = group_sum(torch.ones_like(returns_B), credit.group_ids)
        return _centred(returns_B, credit.group_ids) * size_B / (size_B - 1).clamp(min=1)

    return advantage


@factor(min_group=2)
def batch_std(eps: float = 1e-6) -> AdvantageFn:
    """A = (R - mean(R) of the group) / (std of all rewards of the batch + eps), std unbiased.

    Keeps the relative size of easy and hard groups. ScaleRL, Khatri et al. 2025; TRL.
    """
    require(eps >= 0, f"batch_std: eps={eps} must not be negative, e.g. 1e-6")

    def advantage(credit: Credit) -> Tensor:
        returns_B = returns_of(credit)
        scale = returns_B.std() if len(returns_B) > 1 else returns_B.new_ones(())
        return _where_signal(returns_B, credit.group_ids, _centred(returns_B, credit.group_ids) / (scale + eps))

    return advantage


@factor(min_group=2)
def length_weighted() -> AdvantageFn:
    """A_i = R_i - sum_j T_j R_j / sum_j T_j over the group: the baseline of least variance if scores grow with length.

    Biased, as the baseline holds the member itself: (G-1)/G of the true gradient where lengths are equal. OPO, Hao et
    al. 2025; verl.
    """

    def advantage(credit: Credit) -> Tensor:
        returns_B, lengths_B = returns_of(credit), credit.lengths.to(credit.rewards.dtype)
        earned_B = group_sum(returns_B * lengths_B, credit.group_ids)
        baseline_B = earned_B / group_sum(lengths_B, credit.group_ids)
        return _where_signal(returns_B, credit.group_ids, returns_B - baseline_B)

    return advantage


_MAXRL = ("baseline", "success_only", "all_fail_baseline")


@factor(min_group=2)
def maxrl(variant: str = "baseline") -> AdvantageFn:
    """A_i = (R_i - mean(R)) / mean(R), 0 in groups without success: raises log p, not p, so hard tasks count more.

    log p = -sum_k (1-p)^k / k; cut at order T its gradient is (1-(1-p)^T)/p times that of p. With N samples:
    "baseline" is unbiased for order N-1 and what public code runs; "success_only", A_i = R_i / mean(R), for order N;
    "all_fail_baseline", A_i = -1 for all where nobody succeeded, for order N, with a baseline. At p = 0.3 and N = 3
    they give 1.70, 2.19 and 2.19 of the gradient of p. Rewards must not be negative; 0 or 1 is meant.
    MaxRL; prime-rl, SkyRL.
    """
    require(variant in _MAXRL, f'maxrl: variant="{variant}" is unknown. Use one of {", ".join(_MAXRL)}.')

    def advantage(credit: Credit) -> Tensor:
        returns_B = returns_of(credit)
        if (returns_B < 0).any():
            raise UserError(
                f"maxrl: a return of {returns_B.min().item():g} is negative, but it divides by the group's mean as by "
                f"a success rate. Use rewards of 0 and 1, without penalties in objective.shaping."
            )
        mean_B = _mean(returns_B, credit.group_ids)
        has_success_B = mean_B > 0
        share_B = returns_B / torch.where(has_success_B, mean_B, torch.ones_like(mean_B))
        if variant == "success_only":
            return share_B
        where_failed = 0.0 if variant == "baseline" else -1.0
        given_B = _where_signal(returns_B, credit.group_ids, share_B - 1)
        return torch.where(has_success_B, given_B, torch.full_like(given_B, where_failed))

    return advantage


@factor(min_group=2, experimental="the sharpness that its authors used is not published; 1.0 is ours")
def mgpo(sharpness: float = 1.0, eps: float = 1e-6) -> AdvantageFn:
    """A = exp(-sharpness * D) * A of group_mean_std, D = p ln(2p) + (1-p) ln(2(1-p)), p the group's pass rate.

    Turns to tasks that are solved half of the time; sharpness = 0 is GRPO. p is the mean outcome, kept inside [0, 1].
    VibeThinker-1.5B, section 3.4.
    """
    require(sharpness >= 0, f"mgpo: sharpness={sharpness} must not be negative, e.g. 1.0; 0 is group_mean_std")
    require(eps >= 0, f"mgpo: eps={eps} must not be negative, e.g. 1e-6")

    def advantage(credit: Credit) -> Tensor:
        passed_B = _mean(credit.rewards, credit.group_ids).clamp(0, 1)
        failed_B = 1 - passed_B
        distance_B = torch.xlogy(passed_B, 2 * passed_B) + torch.xlogy(failed_B, 2 * failed_B)
        return (-sharpness * distance_B).exp() * _standardised(returns_of(credit), credit.group_ids, eps)

    return advantage


@factor(min_group=2)
def per_reward(eps: float = 1e-6) -> AdvantageFn:
    """A = sum_k w_k (R_k - mean(R_k)) / (std(R_k) + eps) over the group, for each part k of the reward.

    A part on a small scale then counts as much as one on a large scale. R_k is the part within its bounds, and 0 where
    a gate is closed: among parts that are never negative, nobody is below a closed gate. A member that lacks a part
    enters none of its statistics and gets nothing from it. Shaping changes the sum and not the parts: it is refused.
    GDPO; verl, TRL, NeMo-RL, which whiten over the batch afterwards (normalizers.py).
    """
    require(eps >= 0, f"per_reward: eps={eps} must not be negative, e.g. 1e-6")

    def advantage(credit: Credit) -> Tensor:
        if len(credit.rewards) and not credit.reward_parts:
            raise UserError(
                "per_reward: the reward has no parts to credit one by one. Use a reward made of several named parts, "
                'or objective.advantage = "group_mean_std", which is the same for a single one.'
            )
        total_B = torch.zeros_like(returns_of(credit))
        for name, part_B in credit.reward_parts.items():
            present = (~part_B.isnan()).nonzero()[:, 0]
            # w (R - mean) / (std + eps), from w R as the part was added: the sign of w is in it already.
            size = abs(credit.part_weights.get(name, 1.0))
            total_B[present] += size * _standardised(part_B[present], credit.group_ids[present], eps * size)
        return total_B

    return advantage


def returns_of(credit: Credit) -> Tensor:
    """Everything each trajectory earned. One NaN among them would turn all weights of the model into NaN."""
    returns_B = credit.returns
    if not returns_B.isfinite().all():
        place = int((~returns_B.isfinite()).nonzero()[0, 0])
        raise UserError(
            f"trajectory {place} of the batch earned {returns_B[place].item()}, which cannot be compared. A reward "
            f"must be a finite number; one that cannot be computed is unscorable, not NaN. Check the reward and "
            f"objective.shaping."
        )
    return returns_B


def group_sum(values_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """Sum over each member's group."""
    return values_B.new_zeros(_num_groups(group_ids_B)).index_add(0, group_ids_B, values_B)[group_ids_B]


def group_max(values_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """Largest value in each member's group."""
    start_G = values_B.new_full((_num_groups(group_ids_B),), -float("inf"))
    return start_G.scatter_reduce(0, group_ids_B, values_B, "amax")[group_ids_B]


def _mean(values_B: Tensor, group_ids_B: Tensor) -> Tensor:
    return group_sum(values_B, group_ids_B) / group_sum(torch.ones_like(values_B), group_ids_B)


def _centred(values_B: Tensor, group_ids_B: Tensor) -> Tensor:
    return _where_signal(values_B, group_ids_B, values_B - _mean(values_B, group_ids_B))


def _standardised(values_B: Tensor, group_ids_B: Tensor, eps: float) -> Tensor:
    centred_B = _centred(values_B, group_ids_B)
    size_B = group_sum(torch.ones_like(values_B), group_ids_B)
    variance_B = group_sum(centred_B.square(), group_ids_B) / (size_B - 1).clamp(min=1)
    return _where_signal(values_B, group_ids_B, centred_B / (variance_B.sqrt() + eps))


def _where_signal(values_B: Tensor, group_ids_B: Tensor, advantages_B: Tensor) -> Tensor:
    """Exactly 0 in groups whose values are equal up to float32 noise.

    Not left to 0 / (0 + eps): seven float32 rewards of 0.1 have a std of 8e-9 and would get advantages of 0.0074.
    """
    high_B, low_B = group_max(values_B, group_ids_B), -group_max(-values_B, group_ids_B)
    size_B = torch.maximum(high_B.abs(), low_B.abs()).clamp(min=1.0)
    return torch.where(high_B - low_B > 1e-8 * size_B, advantages_B, torch.zeros_like(advantages_B))


def _num_groups(group_ids_B: Tensor) -> int:
    return int(group_ids_B.max()) + 1 if len(group_ids_B) else 0


ADVANTAGES: dict[str, Callable[..., Advantage]] = {
    "raw": raw,
    "group_mean": group_mean,
    "group_mean_std": group_mean_std,
    "leave_one_out": leave_one_out,
    "batch_std": batch_std,
    "length_weighted": length_weighted,
    "maxrl": maxrl,
    "mgpo": mgpo,
    "per_reward": per_reward,
}
