"""What is done to rewards before credit is given. Penalties come before group statistics, or they partly cancel.

Owns: reward terms that depend on lengths or log-probabilities. Refuses: task scores (rewards/).
Shapes: _B trajectories of the batch, _N its drawn tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from temper.errors import UserError
from temper.objectives.factor import factor, require
from temper.objectives.objective import Credit, Shaping

ShapingFn = Callable[[Credit], Tensor]


@factor(needs=("reference", "proximal"))
def kl_in_reward(coefficient: float) -> ShapingFn:
    """R - coefficient * sum_t (log pi_old - log pi_ref): k1 as a constant in the reward.

    Through the score function its gradient is that of KL(pi || ref), which k1 as a loss would not give.
    Ziegler et al. 2019; RLOO, Ahmadian et al. 2024. Specification 1.1 and 1.8.
    """
    require(coefficient >= 0, f"kl_in_reward: coefficient={coefficient} must not be negative, e.g. 0.05")

    def shaped(credit: Credit) -> Tensor:
        assert credit.reference_log_ratio is not None, "kl_in_reward needs reference log-probabilities"
        trajectory_N = torch.repeat_interleave(torch.arange(len(credit.lengths)), credit.lengths)
        kl_B = torch.zeros_like(credit.rewards).index_add(0, trajectory_N, credit.reference_log_ratio)
        return credit.rewards - coefficient * kl_B

    return shaped


@factor()
def soft_overlong(buffer: int = 4096, coefficient: float = 1.0) -> ShapingFn:
    """DAPO's soft punishment: from 0 to -1 over the last `buffer` tokens before max_new_tokens.

    Counts drawn tokens only, so long observations are not punished. Yu et al. 2025, eq. 13. Specification 1.1.
    """
    require(buffer > 0, f"soft_overlong: buffer={buffer} must be at least 1 token")

    def shaped(credit: Credit) -> Tensor:
        longest = credit.max_new_tokens
        if buffer > longest:
            raise UserError(
                f"soft_overlong: buffer={buffer} is longer than max_new_tokens={longest}, so every completion would be "
                f"punished. Use a part of it, e.g. buffer={max(1, longest // 5)}."
            )
        over_B = (credit.lengths - (longest - buffer)).to(credit.rewards.dtype)
        return credit.rewards - coefficient * (over_B / buffer).clamp(0.0, 1.0)

    return shaped


SHAPINGS: dict[str, Callable[..., Shaping]] = {"kl_in_reward": kl_in_reward, "soft_overlong": soft_overlong}
