"""beta-DPO: a beta for each batch, and the pairs that are too far from usual left out.

Owns: the choice, made once on the margins of a whole batch, and what it remembers between batches. Refuses: the loss;
it is dpo(beta) of preferences.py with weights is_kept / number kept.
Shapes: _P pairs of the whole batch, over all microbatches and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from temper.objectives.factor import require


@dataclass(frozen=True, slots=True, kw_only=True)
class MarginState:
    """What beta_dpo remembers: moving mean and standard deviation of the margins delta."""

    mean: float
    std: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BetaChoice:
    """What beta_dpo decides for one batch; then dpo(beta) with weights is_kept / number kept."""

    is_kept: Tensor
    """[P] of the whole batch."""
    beta: float
    state: MarginState


def beta_dpo(
    margins_P: Tensor,
    state: MarginState | None,
    seed: int,
    *,
    beta: float = 0.1,
    slope: float = 0.6,
    dropped: float = 0.2,
    decay: float = 0.9,
) -> BetaChoice:
    """Which pairs of a batch count, and with which beta: beta (1 + slope (mean kept delta - M)), at least 0.001.

    `margins_P` are delta of the whole batch, all ranks, in an order that does not depend on the partition. Moving mean
    M and deviation S take them in first; (1 - dropped) of the pairs are drawn without replacement with weights
    exp(-((delta - M) / S)^2 / 2). state = None starts M and S at the first batch's own. Wu et al. 2024
    (arXiv 2407.08639); beta-DPO repository.
    """
    require(0 <= dropped < 1, f"beta_dpo: dropped={dropped} must lie in [0, 1), e.g. 0.2")
    assert len(margins_P), "beta_dpo needs at least one pair"
    margins_P = margins_P.detach().double().cpu()
    mean, std = margins_P.mean().item(), margins_P.std().item() if len(margins_P) > 1 else 0.0
    state = state or MarginState(mean=mean, std=std)
    state = MarginState(mean=decay * state.mean + (1 - decay) * mean, std=decay * state.std + (1 - decay) * std)
    distance_P = (margins_P - state.mean) / max(state.std, 1e-8)
    # The largest of log weight + Gumbel noise are a draw without replacement, and far outliers do not underflow to 0.
    uniform_P = torch.rand(len(margins_P), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    keys_P = -distance_P.square() / 2 - torch.log(-torch.log(uniform_P))
    num_kept = max(1, int((1 - dropped) * len(margins_P) + 1e-9))
    is_kept_P = torch.zeros(len(margins_P), dtype=torch.bool)
    is_kept_P[keys_P.topk(num_kept).indices] = True
    kept_mean = margins_P[is_kept_P].mean().item()
    return BetaChoice(is_kept=is_kept_P, beta=max(1e-3, beta * (1 + slope * (kept_mean - state.mean))), state=state)
