"""Who counts how much: one weight per token, made on the whole batch, already holding one over its denominator.

Owns: every denominator of the policy loss. Refuses: masks; a trajectory of length 0 counts nowhere.
Because weights are made before microbatches exist, no split, order or rank count can change the gradient.
Shapes: _B trajectories of one optimiser step, _G its groups.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from temper.errors import UserError
from temper.objectives.advantage.advantages import group_max, group_sum
from temper.objectives.advantage.credit import Extent
from temper.objectives.factor import factor, require
from temper.objectives.objective import SlopedWeighting, Weighting

WeightingFn = Callable[[Extent], Tensor]


@factor()
def token_mean() -> WeightingFn:
    """1/N: every token counts the same, long trajectories more. DAPO."""

    def weights(extent: Extent) -> Tensor:
        return _present(extent.lengths) / extent.lengths.sum().clamp(min=1)

    return weights


@factor()
def sequence_mean() -> WeightingFn:
    """1/(B T_i): every trajectory counts the same. Favours short good answers and forgives long bad ones.

    GRPO, GSPO (seq-mean-token-mean).
    """

    def weights(extent: Extent) -> Tensor:
        present_B = _present(extent.lengths)
        return present_B / (present_B.sum().clamp(min=1) * extent.lengths.clamp(min=1))

    return weights


@factor()
def sequence_sum() -> WeightingFn:
    """1/B: the unbiased policy gradient of whole trajectories. REINFORCE (seq-mean-token-sum)."""

    def weights(extent: Extent) -> Tensor:
        present_B = _present(extent.lengths)
        return present_B / present_B.sum().clamp(min=1)

    return weights


@factor()
def constant_length(length: int | None = None) -> WeightingFn:
    """1/(B L) with a constant L, max_new_tokens unless `length` is given. No length bias.

    Dr. GRPO (seq-mean-token-sum-norm).
    """
    require(length is None or length >= 1, f"constant_length: length={length} must be at least 1 token")

    def weights(extent: Extent) -> Tensor:
        present_B = _present(extent.lengths)
        return present_B / (present_B.sum().clamp(min=1) * (length or extent.max_new_tokens))

    return weights


@factor()
def prompt_mean() -> WeightingFn:
    """1/(P N_p): every task counts the same, tokens equal inside its group. ScaleRL."""

    def weights(extent: Extent) -> Tensor:
        num_prompts = len(set(extent.group_ids[extent.lengths > 0].tolist()))
        return _present(extent.lengths) / (
            max(1, num_prompts) * group_sum(extent.lengths, extent.group_ids).clamp(min=1)
        )

    return weights


@factor()
def token_sum() -> WeightingFn:
    """1: no denominator, for debugging."""
    return lambda extent: _present(extent.lengths)


@factor(experimental="known from a summary of its paper; how its power is learned is not established")
def length_softmax(power: float = 0.0, slope: float = 1 / 9) -> SlopedWeighting:
    """f_i / N with f_i = G softmax_i(h_i^power) in each group, h_i = 1 + slope * (T_i - mean T) / (std T + 1e-6).

    Learns by its power whether long (> 0) or short (< 0) answers count more; 0 is token_mean. The number that is
    learned replaces `power` under this factor's name in Extent.scales. G and all statistics, std unbiased, are over the
    members with tokens. lambda-GRPO.
    """
    require(0 < slope < 1, f"length_softmax: slope={slope} must be between 0 and 1, e.g. {1 / 9:.4f}")

    def shares(extent: Extent) -> tuple[Tensor, Tensor]:
        """[B] softmax inside each group, and the derivative of what it is taken of."""
        now, present_B = extent.scales.get("length_softmax", power), _present(extent.lengths)
        height_B = _heights(extent, slope)
        risen_B = height_B**now
        # Without the shift a large power overflows. Heights are positive, so 0 stands for nobody.
        highest_B = group_max(risen_B * present_B, extent.group_ids)
        share_B = (risen_B - highest_B).exp() * present_B
        return share_B / group_sum(share_B, extent.group_ids).clamp(min=1), risen_B * height_B.log()

    def weights(extent: Extent) -> Tensor:
        size_B = group_sum(_present(extent.lengths), extent.group_ids)
        return size_B * shares(extent)[0] / extent.lengths.sum().clamp(min=1)

    def slopes(extent: Extent) -> Tensor:
        share_B, rise_B = shares(extent)
        return (rise_B - group_sum(share_B * rise_B, extent.group_ids)) * _present(extent.lengths)

    return SlopedWeighting(weights, slopes)


def _heights(extent: Extent, slope: float) -> Tensor:
    """[B] 1 + slope * standardised length in the group, over members with tokens; 1 for the others."""
    present_B = _present(extent.lengths)
    size_B = group_sum(present_B, extent.group_ids)
    mean_B = group_sum(extent.lengths.double(), extent.group_ids) / size_B.clamp(min=1)
    away_B = (extent.lengths - mean_B) * present_B
    std_B = (group_sum(away_B.square(), extent.group_ids) / (size_B - 1).clamp(min=1)).sqrt()
    height_B = 1 + slope * away_B / (std_B + 1e-6)
    if (height_B <= 0).any():
        raise UserError(
            f"length_softmax: slope={slope:g} is too steep for a group of {int(size_B.max())}: one answer is so much "
            f"shorter than the others that its weight is undefined. Use a smaller slope, or group_size <= 82 with 1/9."
        )
    return height_B


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
    "length_softmax": length_softmax,
}
