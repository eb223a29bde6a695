"""What is done to rewards before credit is given. Penalties come before group statistics, or they partly cancel.

Owns: reward terms that depend on lengths, limits or log-probabilities. Refuses: task scores (rewards/).
The registry is in the order in which they belong: length terms, truncation rules, clip range, KL.
Shapes: _B trajectories of the batch, _N its drawn tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from temper.errors import UserError
from temper.objectives.advantage.credit import Credit
from temper.objectives.factor import factor, require
from temper.objectives.objective import Shaping

ShapingFn = Callable[[Credit], Credit]


@factor()
def soft_overlong(buffer: int | None = None, coefficient: float = 1.0) -> ShapingFn:
    """DAPO's soft punishment: from 0 to -1 over the last `buffer` tokens before a limit.

    The limits are max_new_tokens, for the longest turn, and rollout.max_episode_tokens, for all turns together; the
    nearer one counts. Unset: the last fifth of each, as in the paper, where it is 4096 of 20480.
    Counts drawn tokens only, so long observations are not punished. Yu et al. 2025, eq. 13.
    """
    require(buffer is None or buffer > 0, f"soft_overlong: buffer={buffer} must be at least 1 token")

    def shaped(credit: Credit) -> Credit:
        punished_B = _nearness("max_new_tokens", credit.max_new_tokens, credit.longest_turns, buffer)
        if credit.max_episode_tokens:
            whole_B = _nearness("max_episode_tokens", credit.max_episode_tokens, credit.lengths, buffer)
            punished_B = torch.maximum(punished_B, whole_B)
        return replace(credit, rewards=credit.rewards - coefficient * punished_B)

    return shaped


def _nearness(name: str, limit: int, drawn_B: Tensor, buffer: int | None) -> Tensor:
    """[B] how far into the buffer before a limit an answer reaches: 0 before it, 1 at the limit."""
    width = max(1, limit // 5) if buffer is None else buffer
    if width > limit:
        raise UserError(
            f"soft_overlong: buffer={width} is longer than {name}={limit}, so every completion would be punished. Use "
            f"a part of it, e.g. buffer={max(1, limit // 5)}."
        )
    return ((drawn_B - (limit - width)).double() / width).clamp(0.0, 1.0)


@factor()
def length_exact(target: int, alpha: float = 0.0003) -> ShapingFn:
    """R - alpha * |target - n|, n drawn tokens: answers of one length. L1 (exact), l1 repository."""
    require(target >= 1, f"length_exact: target={target} must be at least 1 token, e.g. 1000")
    require(alpha >= 0, f"length_exact: alpha={alpha} must not be negative, e.g. 0.0003")

    def shaped(credit: Credit) -> Credit:
        missed_B = (target - credit.lengths).abs().to(credit.rewards.dtype)
        return replace(credit, rewards=credit.rewards - alpha * missed_B)

    return shaped


@factor(
    experimental="its paper and its repository differ by a factor of 2 in the slope; the paper's form is the default"
)
def length_max(target: int, form: str = "paper", alpha: float = 0.0003, delta: float = 0.5) -> ShapingFn:
    """R * clip(alpha * (target - n) + delta, 0, 1): answers of at most one length, wrong ones unchanged at 0.

    form = "repository": R * (clip(alpha * (target - n), -1, 1) + 1) / 2, without delta. L1 (max).
    """
    require(target >= 1, f"length_max: target={target} must be at least 1 token, e.g. 1000")
    require(form in ("paper", "repository"), f'length_max: form="{form}" is unknown. Use "paper" or "repository".')
    require(alpha >= 0, f"length_max: alpha={alpha} must not be negative, e.g. 0.0003")

    def shaped(credit: Credit) -> Credit:
        spare_B = alpha * (target - credit.lengths).to(credit.rewards.dtype)
        share_B = (spare_B + delta).clamp(0, 1) if form == "paper" else (spare_B.clamp(-1, 1) + 1) / 2
        return replace(credit, rewards=credit.rewards * share_B)

    return shaped


@factor()
def stop_properly(factor: float) -> ShapingFn:
    """For answers cut at a limit: R * factor if 0 <= factor <= 1, R := factor if it is negative.

    Makes an answer that did not end worth less, whatever it says. OpenRLHF (ProRL v2).
    """
    require(
        factor <= 1, f"stop_properly: factor={factor} would reward running on. Use 0 to 1, or less than 0, e.g. 0.5"
    )

    def shaped(credit: Credit) -> Credit:
        cut_B = credit.rewards * factor if factor >= 0 else torch.full_like(credit.rewards, factor)
        return replace(credit, rewards=torch.where(credit.is_truncated, cut_B, credit.rewards))

    return shaped


@factor()
def exclude_truncated_from_stats() -> ShapingFn:
    """Answers cut at a limit enter no group's mean or std, and get advantage 0 from estimators that compare members.

    Each becomes a group of its own: nobody is compared with it. The rest of overlong filtering, not to train on them,
    is decided where batches are made; the batch's own std (batch_std) still counts them. TRL.
    """

    def shaped(credit: Credit) -> Credit:
        if not len(credit.group_ids):
            return credit
        alone_B = credit.group_ids.max() + 1 + torch.arange(len(credit.group_ids))
        return replace(credit, group_ids=torch.where(credit.is_truncated, alone_B, credit.group_ids))

    return shaped


@factor()
def clip_reward(low: float, high: float) -> ShapingFn:
    """clip(R, low, high) of the outcome; rewards inside a trajectory, such as KL, stay."""
    require(low < high, f"clip_reward: low={low} must be below high={high}, e.g. low=-1.0, high=1.0")
    return lambda credit: replace(credit, rewards=credit.rewards.clamp(low, high))


@factor(needs=("reference", "proximal"))
def kl_in_reward(coefficient: float) -> ShapingFn:
    """R_t = -coefficient * (log pi_old - log pi_ref) inside the trajectory: k1 as a constant in the reward.

    Through the score function its gradient is that of KL(pi || ref), which k1 as a loss would not give.
    Ziegler et al. 2019; RLOO, Ahmadian et al. 2024.
    """
    require(coefficient >= 0, f"kl_in_reward: coefficient={coefficient} must not be negative, e.g. 0.05")

    def shaped(credit: Credit) -> Credit:
        assert credit.proximal_logprobs is not None, "kl_in_reward needs the proximal pass"
        assert credit.reference_logprobs is not None, "kl_in_reward needs reference log-probabilities"
        scale = coefficient * credit.scales.get("kl_in_reward", 1.0)
        penalty_N = -scale * (credit.proximal_logprobs - credit.reference_logprobs)
        inside_N = penalty_N if credit.token_rewards is None else credit.token_rewards + penalty_N
        return replace(credit, token_rewards=inside_N)

    return shaped


SHAPINGS: dict[str, Callable[..., Shaping]] = {
    "soft_overlong": soft_overlong,
    "length_exact": length_exact,
    "length_max": length_max,
    "stop_properly": stop_properly,
    "exclude_truncated_from_stats": exclude_truncated_from_stats,
    "clip_reward": clip_reward,
    "kl_in_reward": kl_in_reward,
}
