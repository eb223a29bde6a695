"""Direct alignment without pairs: completions that were labelled one by one, or that won against an opponent.

Owns: KTO and Nash-MD. Refuses: pairs (preferences.py); `weights` hold every denominator there and here.
Shapes: _P labelled completions of one microbatch, _T drawn tokens, _S their trajectories, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from temper.objectives.factor import Factor, factor, require
from temper.objectives.metrics import MetricSums, mean_sums
from temper.objectives.tokens import ordered_sums
from temper.types import require_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledCompletions:
    """Single completions called good or bad, all columns [P]. Log-probabilities are sums over response tokens."""

    logprobs: Tensor
    """By the policy, with gradient."""
    reference_logprobs: Tensor
    is_desirable: Tensor
    weights: Tensor
    """Share of each completion in the loss of the whole batch, e.g. one over its number of completions."""
    baseline: float
    """How far the policy is from the reference on completions that do not belong to their prompts (kto_baseline)."""

    def __post_init__(self) -> None:
        require_parallel(self, "logprobs", "reference_logprobs", "is_desirable", "weights")
        assert not self.reference_logprobs.requires_grad, "reference_logprobs must not carry a gradient"


LabelledPreference = Factor[[LabelledCompletions], Tensor]
"""Losses [P]."""


@factor(needs=("reference",))
def kto(
    beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
) -> Callable[[LabelledCompletions], Tensor]:
    """Desirable: w_d (1 - sig(beta (u - z))); undesirable: w_u (1 - sig(beta (z - u))); z = baseline.

    Needs no pairs, only good and bad completions. Ethayarajh et al. 2024 (arXiv 2402.01306); TRL.
    """
    require(beta > 0, f"kto: beta={beta} must be positive, e.g. 0.1; a large beta stays close to the reference")

    def losses(labelled: LabelledCompletions) -> Tensor:
        gain_P = beta * (labelled.logprobs - labelled.reference_logprobs - labelled.baseline)
        # 1 - sig(x) = sig(-x), without the cancellation.
        desirable_P, undesirable_P = torch.sigmoid(-gain_P), torch.sigmoid(gain_P)
        return torch.where(labelled.is_desirable, desirable_weight * desirable_P, undesirable_weight * undesirable_P)

    return losses


def mismatched_rows(num_rows: int) -> list[int]:
    """Whose completion follows prompt i when KTO's baseline is measured: that of row i - 1, cyclic."""
    require(num_rows >= 2, f"kto: a batch of {num_rows} has no mismatched completion. Use 2 or more rows per step.")
    return [(row - 1) % num_rows for row in range(num_rows)]


def kto_baseline(mismatched_logprobs: Tensor, reference_logprobs: Tensor) -> float:
    """z = max(0, mean of log pi - log ref over mismatched pairs of the whole batch, all ranks)."""
    return max(0.0, (mismatched_logprobs.detach().double() - reference_logprobs.double()).mean().item())


def labelled_loss(rule: LabelledPreference, labelled: LabelledCompletions) -> tuple[Tensor, MetricSums]:
    """This microbatch's part of the loss, and sums for its metrics; parts of all microbatches and ranks add up."""
    losses_P = rule(labelled)
    loss = (losses_P * labelled.weights).sum()
    with torch.no_grad():
        metrics = MetricSums(totals={"loss/preference": loss.detach().double()})
        reward_P = rule.argument("beta") * (labelled.logprobs - labelled.reference_logprobs)
        for name, is_one_P in (("desirable", labelled.is_desirable), ("undesirable", ~labelled.is_desirable)):
            means = {"reward": reward_P[is_one_P], "logprob": labelled.logprobs[is_one_P]}
            metrics = metrics.merge(mean_sums({f"preference/{name}_{key}": column for key, column in means.items()}))
    return loss, metrics


def nash_md_losses(
    policy_logprobs_T: Tensor,
    reference_logprobs_T: Tensor,
    trajectory_ids_T: Tensor,
    win_probabilities_S: Tensor,
    beta: float = 0.1,
) -> Tensor:
    """[S] -(P(win) - 0.5) sum_t log pi_t + beta sum_t sg[log pi_t - log ref_t] log pi_t.

    P(win) is against an opponent drawn from geometric_mixture. Munos et al. 2023 (arXiv 2312.00886); TRL.
    """
    assert not reference_logprobs_T.requires_grad, "reference_logprobs_T must not carry a gradient"
    cost_T = beta * (policy_logprobs_T.detach() - reference_logprobs_T)
    terms_T = (cost_T - (win_probabilities_S - 0.5)[trajectory_ids_T]) * policy_logprobs_T
    return ordered_sums(terms_T, trajectory_ids_T, len(win_probabilities_S))


def geometric_mixture(policy_logits: Tensor, reference_logits: Tensor, share: float = 0.5) -> Tensor:
    """[..., V] log-probabilities of Nash-MD's opponent: proportional to pi^(1 - share) ref^share."""
    require(0 <= share <= 1, f"geometric_mixture: share={share} must lie between 0 and 1, e.g. 0.5")
    mixed = (1 - share) * policy_logits.log_softmax(-1) + share * reference_logits.log_softmax(-1)
    return mixed.log_softmax(-1)


UNPAIRED: dict[str, Callable[..., LabelledPreference]] = {"kto": kto}
