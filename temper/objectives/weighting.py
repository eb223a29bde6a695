"""Who counts how much: one weight per token, made on the whole batch, already holding one over its denominator.

Owns: every denominator of the policy loss. Refuses: masks; a trajectory of length 0 counts nowhere.
Because weights are made before microbatches exist, no split, order or rank count can change the gradient.
Shapes: _B trajectories of one optimiser step, _G its groups.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from temper.objectives.factor import factor, require
from temper.objectives.objective import Weighting

WeightingFn = Callable[[Tensor, Tensor, int], Tensor]


@factor()
def token_mean() -> WeightingFn:
    """1/N: every token counts the same, long trajectories more. DAPO. Specification 1.7."""

    def weights(lengths_B: Tensor, group_ids_B: Tensor, max_new_tokens: int) -> Tensor:
        return _present(lengths_B) / lengths_B.sum().clamp(min=1)

    return weights


@factor()
def sequence_mean() -> WeightingFn:
    """1/(B T_i): every trajectory counts the same. Favours short good answers and forgives long bad ones.

    GRPO, GSPO. Specification 1.7 (seq-mean-token-mean).
    """

    def weights(lengths_B: Tensor, group_ids_B: Tensor, max_new_tokens: int) -> Tensor:
        present_B = _present(lengths_B)
        return present_B / (present_B.sum().clamp(min=1) * lengths_B.clamp(min=1))

    return weights


@factor()
def sequence_sum() -> WeightingFn:
    """1/B: the unbiased policy gradient of whole trajectories. REINFORCE. Specification 1.7 (seq-mean-token-sum)."""

    def weights(lengths_B: Tensor, group_ids_B: Tensor, max_new_tokens: int) -> Tensor:
        present_B = _present(lengths_B)
        return present_B / present_B.sum().clamp(min=1)

    return weights


@factor()
def constant_length(length: int | None = None) -> WeightingFn:
    """1/(B L) with a constant L, the longest answer the run allows unless `length` is given. No length bias.

    Dr. GRPO. Specification 1.7 (seq-mean-token-sum-norm).
    """
    require(length is None or length >= 1, f"constant_length: length={length} must be at least 1 token")

    def weights(lengths_B: Tensor, group_ids_B: Tensor, max_new_tokens: int) -> Tensor:
        present_B = _present(lengths_B)
        return present_B / (present_B.sum().clamp(min=1) * (length or max_new_tokens))

    return weights


@factor()
def prompt_mean() -> WeightingFn:
    """1/(P N_p): every task counts the same, tokens equal inside its group. ScaleRL. Specification 1.7."""

    def weights(lengths_B: Tensor, group_ids_B: Tensor, max_new_tokens: int) -> Tensor:
        num_groups = int(group_ids_B.max()) + 1 if len(group_ids_B) else 0
        tokens_G = torch.zeros(num_groups, dtype=torch.int64).index_add(0, group_ids_B, lengths_B)
        num_prompts = (tokens_G > 0).sum().clamp(min=1)
        return _present(lengths_B) / (num_prompts * tokens_G[group_ids_B].clamp(min=1))

    return weights


@factor()
def token_sum() -> WeightingFn:
    """1: no denominator, for debugging. Specification 1.7."""
    return lambda lengths_B, group_ids_B, max_new_tokens: _present(lengths_B)


def _present(lengths_B: Tensor) -> Tensor:
    """1.0 for trajectories with tokens, 0.0 for the others; sets the precision of all weights."""
    return (lengths_B > 0).double()


WEIGHTINGS: dict[str, Callable[..., Weighting]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "constant_length": constant_length,
    "prompt_mean": prompt_mean,
    "token_sum": token_sum,
}
