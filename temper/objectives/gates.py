"""How far one update may move a token's probability. A gate turns log-ratios into gain; larger is better.

Owns: trust-region forms. Refuses: advantages (advantages.py), denominators (weighting.py).
Shapes: _T drawn tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from temper.objectives.factor import factor, require
from temper.objectives.objective import Gain, Gate, Tokens

GateFn = Callable[[Tokens, Tensor], Gain]


@factor()
def none() -> GateFn:
    """A log pi: plain policy gradient, no ratio. Williams 1992. Specification 1.5."""

    def gain(tokens: Tokens, log_ratio_T: Tensor) -> Gain:
        value_T = tokens.advantages * tokens.policy_logprobs
        return Gain(value_T, clipped=torch.zeros_like(log_ratio_T, dtype=torch.bool))

    return gain


@factor()
def importance() -> GateFn:
    """r A: importance-weighted policy gradient without a trust region. Specification 1.5 (pg_is)."""

    def gain(tokens: Tokens, log_ratio_T: Tensor) -> Gain:
        value_T = log_ratio_T.exp() * tokens.advantages
        return Gain(value_T, clipped=torch.zeros_like(log_ratio_T, dtype=torch.bool))

    return gain


@factor()
def clip(low: float = 0.2, high: float = 0.2, dual: float | None = None) -> GateFn:
    """PPO's clipped surrogate: min(r A, clip(r, 1 - low, 1 + high) A).

    The minimum stops the gradient only where the update would move further in the direction the advantage
    already pushed; a token that moved the wrong way keeps its gradient. DAPO's clip-higher is high > low.
    With `dual`, tokens of negative advantage lose their gradient beyond r = dual as well: they would otherwise have
    no bound (dual clip, Ye et al. 2020; the same thing is INTELLECT-2's two-sided delta).
    Schulman et al. 2017, eq. 7. Specification 1.5.
    """
    require(low >= 0 and high >= 0, f"clip: low={low} and high={high} must not be negative, e.g. low=0.2, high=0.28")
    require(dual is None or dual > 1 + high, f"clip: dual={dual} must exceed 1 + high = {1 + high}, e.g. dual=3.0")

    def gain(tokens: Tokens, log_ratio_T: Tensor) -> Gain:
        ratio_T = log_ratio_T.exp()
        free_T = ratio_T * tokens.advantages
        bound_T = ratio_T.clamp(1 - low, 1 + high) * tokens.advantages
        value_T, clipped_T = torch.minimum(free_T, bound_T), bound_T < free_T
        if dual is not None:
            floor_T = torch.where(tokens.advantages < 0, dual * tokens.advantages, -float("inf"))
            value_T, clipped_T = torch.maximum(value_T, floor_T), clipped_T | (free_T < floor_T)
        return Gain(value_T, clipped_T)

    return gain


@factor()
def cispo(cap: float = 5.0) -> GateFn:
    """CISPO: stop-gradient(min(r, cap)) A log pi. Every token keeps a gradient; only its size is bounded.

    `cap` is the absolute bound, not 1 + epsilon. MiniMax 2025 (M1). Specification 1.5.
    """
    require(cap > 0, f"cispo: cap={cap} must be positive, e.g. cap=5.0")

    def gain(tokens: Tokens, log_ratio_T: Tensor) -> Gain:
        ratio_T = log_ratio_T.detach().exp()
        value_T = ratio_T.clamp(max=cap) * tokens.advantages * tokens.policy_logprobs
        return Gain(value_T, clipped=ratio_T > cap)

    return gain


GATES: dict[str, Callable[..., Gate]] = {"none": none, "importance": importance, "clip": clip, "cispo": cispo}
