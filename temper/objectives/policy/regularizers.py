"""Terms beside the policy gain: distances to other policies, entropy, imitation. Each returns its part of the loss.

Owns: the terms and their denominators. Refuses: coefficients that change over time (controllers.py scales them).
Shapes: _T drawn tokens of a microbatch, _N of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from temper.objectives.factor import factor, require
from temper.objectives.objective import BatchMeasure, PolicyObjective, Regularizer
from temper.objectives.policy.selections import chosen_count, covariances
from temper.objectives.tokens import Tokens, bounded

RegularizerFn = Callable[[Tokens], Tensor]
Estimator = Callable[[Tensor, Tensor], Tensor]
"""(D, log r) -> penalty [T]: D = log pi - log of the other policy, r = pi / pi_old; both bounded."""


@factor(needs=("reference",))
def kl(coefficient: float, estimator: str = "k3_is") -> RegularizerFn:
    """coefficient * KL(pi || ref), token by token, under the weights of the policy loss: stay near the reference.

    With D = log pi - log ref, what each estimator follows when it is differentiated on-policy:
    k1 = D: nothing, its expected gradient is 0. k2 = D^2/2: KL(pi || ref). k3 = exp(-D) - 1 + D: KL(ref || pi), the
    other direction. k3_is = r k3, also through r: KL(pi || ref), and unbiased off-policy; the default.
    k1+, k3+: value of k1 or k3, gradient of k2. Both policies are taken over the whole vocabulary, also where top-k,
    top-p or min-p cut what was drawn. Schulman 2020; Tang and Munos 2025.
    """
    penalty = _estimator("kl", coefficient, estimator)

    def term(tokens: Tokens) -> Tensor:
        assert tokens.reference_logprobs is not None, "a KL to the reference needs reference log-probabilities"
        return coefficient * _total(penalty, tokens, tokens.over_vocabulary - tokens.reference_logprobs)

    return term


@factor(needs=("teacher",))
def teacher_kl(coefficient: float = 1.0, estimator: str = "k3_is") -> RegularizerFn:
    """coefficient * KL to the teacher on drawn tokens, under the policy's weights: distillation without a reward.

    With D = log pi - log teacher and pi the student, on-policy: k2, k3_is, k1+ and k3+ follow KL(student || teacher),
    which seeks one mode; k3 follows KL(teacher || student), which covers all. k1 is refused: it follows nothing.
    TRL, slime.
    """
    require(
        estimator != "k1",
        'teacher_kl: estimator="k1" would teach nothing: its expected gradient is 0. Use "k3_is" or "k1+".',
    )
    penalty = _estimator("teacher_kl", coefficient, estimator)

    def term(tokens: Tokens) -> Tensor:
        assert tokens.teacher_logprobs is not None, "a KL to the teacher needs teacher log-probabilities"
        return coefficient * _total(penalty, tokens, tokens.policy_logprobs - tokens.teacher_logprobs)

    return term


@factor(needs=("entropy",))
def entropy_bonus(coefficient: float) -> RegularizerFn:
    """-coefficient * mean entropy: keep exploring. The mean is over tokens whatever the policy's weighting is.

    Williams and Peng 1991.
    """

    def bonus(tokens: Tokens) -> Tensor:
        assert tokens.entropy is not None, "entropy_bonus needs the entropy of each position"
        return -coefficient * tokens.entropy.sum() / max(1, tokens.num_batch_tokens)

    return bonus


@factor(needs=("batch",))
def kl_cov(share: float = 2e-4, coefficient: float = 1.0) -> RegularizerFn:
    """KL-Cov: coefficient * |log pi - log pi_old| on the max(1, floor(share N)) tokens of largest cov (selections.py),
    under the weights of the policy loss: slows down the tokens that collapse entropy.

    |k1| has the sign of the drift only, so it follows neither direction of KL; it pulls back to pi_old with constant
    force. Of equal tokens the earlier ones are chosen. Entropy Mechanism, arXiv 2505.22617; verl.
    """
    require(0 < share <= 1, f"kl_cov: share={share} must lie in (0, 1], e.g. share=2e-4")
    require(coefficient >= 0, f"kl_cov: coefficient={coefficient} must not be negative, e.g. 1.0")

    def measure(whole: Tokens, objective: PolicyObjective) -> Tensor:
        order_N = covariances(whole).sort(descending=True, stable=True).indices
        is_chosen_N = torch.zeros_like(whole.weights)
        is_chosen_N[order_N[: chosen_count(share, len(whole))]] = 1.0
        return is_chosen_N

    def use(tokens: Tokens, is_chosen_T: Tensor) -> Tensor:
        drift_T = (tokens.policy_logprobs - tokens.proximal_logprobs).abs()
        return coefficient * (drift_T * is_chosen_T * tokens.weights).sum()

    return BatchMeasure("kl_cov", measure, use)


@factor()
def behavior_square(coefficient: float = 1e-3) -> RegularizerFn:
    """coefficient * (log pi - log mu)^2 on all tokens, under the weights of the policy loss: stay near the sampler,
    also where a mask took the policy gradient away.

    Twice k2 towards mu, so on-policy it follows KL(pi || mu). prime-rl.
    """
    require(coefficient >= 0, f"behavior_square: coefficient={coefficient} must not be negative, e.g. 1e-3")

    def term(tokens: Tokens) -> Tensor:
        square_T = (tokens.policy_logprobs - tokens.behavior_logprobs).square()
        return coefficient * (square_T * tokens.weights).sum()

    return term


@factor()
def positive_nll(coefficient: float = 0.1, threshold: float = 1.0) -> RegularizerFn:
    """coefficient * mean of -log pi over the tokens of trajectories with reward >= threshold: imitate what was right.

    Its denominator is the number of such tokens in the whole batch; without any, the term is 0.
    VAPO, arXiv 2504.05118; NeMo-RL.
    """
    require(coefficient >= 0, f"positive_nll: coefficient={coefficient} must not be negative, e.g. 0.1")

    def measure(whole: Tokens, objective: PolicyObjective) -> Tensor:
        assert whole.rewards is not None, "positive_nll needs the reward of each trajectory"
        is_correct_N = (whole.rewards >= threshold).to(whole.weights.dtype)
        return is_correct_N / is_correct_N.sum().clamp(min=1)

    def use(tokens: Tokens, share_T: Tensor) -> Tensor:
        return -coefficient * (tokens.policy_logprobs * share_T).sum()

    return BatchMeasure("positive_nll", measure, use)


def k1(distance_T: Tensor, log_ratio_T: Tensor) -> Tensor:
    return distance_T


def k2(distance_T: Tensor, log_ratio_T: Tensor) -> Tensor:
    return distance_T.square() / 2


def k3(distance_T: Tensor, log_ratio_T: Tensor) -> Tensor:
    return torch.exp(-distance_T) - 1 + distance_T


def k3_is(distance_T: Tensor, log_ratio_T: Tensor) -> Tensor:
    return log_ratio_T.exp() * k3(distance_T, log_ratio_T)


def with_gradient_of_k2(estimator: Estimator) -> Estimator:
    def penalty(distance_T: Tensor, log_ratio_T: Tensor) -> Tensor:
        square_T = k2(distance_T, log_ratio_T)
        return square_T - square_T.detach() + estimator(distance_T, log_ratio_T).detach()

    return penalty


KL_ESTIMATORS: dict[str, Estimator] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3_is": k3_is,
    "k1+": with_gradient_of_k2(k1),
    "k3+": with_gradient_of_k2(k3),
}


def _estimator(name: str, coefficient: float, estimator: str) -> Estimator:
    require(coefficient >= 0, f"{name}: coefficient={coefficient} must not be negative, e.g. 0.001")
    known = ", ".join(KL_ESTIMATORS)
    require(estimator in KL_ESTIMATORS, f'{name}: estimator="{estimator}" is unknown. Use one of {known}.')
    return KL_ESTIMATORS[estimator]


def _total(penalty: Estimator, tokens: Tokens, distance_T: Tensor) -> Tensor:
    log_ratio_T = bounded(tokens.policy_logprobs - tokens.proximal_logprobs)
    return (penalty(bounded(distance_T), log_ratio_T) * tokens.weights).sum()


REGULARIZERS: dict[str, Callable[..., Regularizer]] = {
    "kl": kl,
    "teacher_kl": teacher_kl,
    "entropy_bonus": entropy_bonus,
    "kl_cov": kl_cov,
    "behavior_square": behavior_square,
    "positive_nll": positive_nll,
}
