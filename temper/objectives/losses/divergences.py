"""Losses from a teacher: the student's distribution, or its tokens, brought nearer to the teacher's.

Owns: what each loss reads from Tokens. Refuses: the mathematics of divergences (distillation.py), distillation by
policy gradient (token_advantages.py), and the whole distributions, which only the trainer has (Compared).
Shapes: _T drawn tokens of one microbatch, _TK the teacher's most likely tokens there, _CV logits of some positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from temper.objectives.advantage.token_advantages import require_share
from temper.objectives.factor import require
from temper.objectives.losses.distillation import distillation_loss, require_gkd, top_k_forward_kl
from temper.objectives.losses.distillation import gkd as gkd_divergence
from temper.objectives.metrics import MetricSums, mean_sums
from temper.objectives.objective import Loss, LossFn, loss_on
from temper.objectives.policy.regularizers import Estimator
from temper.objectives.policy.regularizers import k2 as k2_estimate
from temper.objectives.policy.regularizers import k3 as k3_estimate
from temper.objectives.tokens import Tokens, bounded


@dataclass(frozen=True, slots=True)
class DivergenceLoss:
    """A direct loss in two parts, for logits of all positions never exist at once: the trainer takes the divergence by
    chunks, and the loss weighs it."""

    divergence: Callable[[Tensor, Tensor], Tensor]
    """(student's logits [C, V], teacher's) -> [C], as the head gives them: before any temperature."""

    def __call__(self, tokens: Tokens) -> tuple[Tensor, MetricSums]:
        assert tokens.divergence is not None, "a comparison of distributions needs a teacher"
        return _weighed(tokens, tokens.divergence)


@loss_on("texts", needs=("divergence",))
def gkd(beta: float = 0.5, temperature: float = 0.9, lmbda: float = 0.5) -> LossFn:
    """Divergence of student S and teacher Q at every position (distillation.gkd), mean over the batch's tokens.

    beta 0: KL(Q || S), covers the teacher. beta 1: KL(S || Q), seeks its modes. Between: the generalised Jensen-Shannon
    divergence. A step trains on the student's samples with probability lmbda, else on texts of the data set.
    Agarwal et al. 2023 (arXiv 2306.13649); TRL (gkd).
    """
    require_gkd(beta, temperature)
    require_share("gkd", "lmbda", lmbda)
    return DivergenceLoss(partial(gkd_divergence, beta=beta, temperature=temperature))


@loss_on("texts", needs=("teacher_top_k",))
def top_k_teacher(k: int = 64, lmbda: float = 1.0) -> LossFn:
    """KL(Q || S) over the teacher's k most likely tokens and one bucket for the rest: a lower bound of the whole one.

    Both at the sampler's temperature. lmbda as for gkd. Without the bucket the sum may be negative and public code
    clamps it; with it, a k of the vocabulary's size or more gives the whole one. verl.
    """
    require(k >= 1, f"top_k_teacher: k={k} must be at least 1 token, e.g. k=64")
    require_share("top_k_teacher", "lmbda", lmbda)

    def run(tokens: Tokens) -> tuple[Tensor, MetricSums]:
        assert tokens.top is not None, "top_k_teacher needs the teacher's most likely tokens"
        assert tokens.top.ids.shape[1] <= k, f"top_k_teacher has {tokens.top.ids.shape[1]} tokens and reads {k}"
        return _weighed(tokens, top_k_forward_kl(tokens.top.policy_logprobs, tokens.top.anchor_logprobs))

    return run


@loss_on("texts", needs=("teacher",))
def k2() -> LossFn:
    """D^2 / 2 at drawn tokens, D = log S - log Q, through the student: follows KL(S || Q) on the student's own samples.

    D is bounded by 20: a token that the teacher rules out must not be an infinite loss. slime, verl.
    """
    return lambda tokens: _estimated(tokens, k2_estimate)


@loss_on("texts", needs=("teacher",))
def k3() -> LossFn:
    """exp(-D) - 1 + D at drawn tokens, D = log S - log Q, bounded by 20, through the student.

    Its value estimates KL(S || Q), but differentiated on the student's own samples it follows KL(Q || S), which covers
    the teacher. k1 = D is not offered: its expected gradient is 0. Schulman 2020; verl.
    """
    return lambda tokens: _estimated(tokens, k3_estimate)


def _estimated(tokens: Tokens, estimator: Estimator) -> tuple[Tensor, MetricSums]:
    assert tokens.teacher_logprobs is not None, "this loss needs the teacher's log-probabilities"
    distance_T = bounded(tokens.policy_logprobs - tokens.teacher_logprobs)
    # The ratio to the policy of the batch's start plays no part: these two do not read it.
    return _weighed(tokens, estimator(distance_T, distance_T.new_zeros(())))


def _weighed(tokens: Tokens, divergences_T: Tensor) -> tuple[Tensor, MetricSums]:
    loss, metrics = distillation_loss(divergences_T, tokens.weights)
    seen = {"policy/logprob": tokens.policy_logprobs}
    if tokens.entropy is not None:
        seen["policy/entropy"] = tokens.entropy
    return loss, metrics.merge(mean_sums(seen))


DIVERGENCE_LOSSES: dict[str, Callable[..., Loss]] = {
    "gkd": gkd,
    "top_k_teacher": top_k_teacher,
    "k2": k2,
    "k3": k3,
}
