"""Terms beside the policy gain: distance to a reference, entropy. Each returns its part of the loss, a scalar.

Owns: the terms and their denominators. Refuses: coefficients that change over time (their controller owns them).
Shapes: _T drawn tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from temper.objectives.factor import factor, require
from temper.objectives.objective import Regularizer, Tokens, bounded

RegularizerFn = Callable[[Tokens], Tensor]


@factor(needs=("reference",))
def kl(coefficient: float, estimator: str = "k3_is") -> RegularizerFn:
    """coefficient * KL(pi || ref), token by token, under the weights of the policy loss.

    With D = log pi - log ref, what each estimator follows when it is differentiated on-policy:
    k1 = D: nothing, its expected gradient is 0. k2 = D^2/2: KL(pi || ref). k3 = exp(-D) - 1 + D: KL(ref || pi), the
    other direction. k3_is = r k3, also through r: KL(pi || ref), and unbiased off-policy; the default.
    k1+, k3+: value of k1 or k3, gradient of k2. Schulman 2020; Tang and Munos 2025. Specification 1.8.
    """
    require(coefficient >= 0, f"kl: coefficient={coefficient} must not be negative, e.g. 0.001")
    known = ", ".join(KL_ESTIMATORS)
    require(estimator in KL_ESTIMATORS, f'kl: estimator="{estimator}" is unknown. Use one of {known}.')
    penalty = KL_ESTIMATORS[estimator]
    return lambda tokens: coefficient * (penalty(tokens) * tokens.weights).sum()


@factor(needs=("entropy",))
def entropy_bonus(coefficient: float) -> RegularizerFn:
    """-coefficient * mean entropy. The mean is over tokens whatever the policy's weighting is. Specification 1.9."""

    def bonus(tokens: Tokens) -> Tensor:
        assert tokens.entropy is not None, "entropy_bonus needs the entropy of each position"
        return -coefficient * tokens.entropy.sum() / max(1, tokens.num_batch_tokens)

    return bonus


def k1(tokens: Tokens) -> Tensor:
    return _distance(tokens)


def k2(tokens: Tokens) -> Tensor:
    return _distance(tokens).square() / 2


def k3(tokens: Tokens) -> Tensor:
    distance_T = _distance(tokens)
    return torch.exp(-distance_T) - 1 + distance_T


def k3_is(tokens: Tokens) -> Tensor:
    return bounded(tokens.policy_logprobs - tokens.proximal_logprobs).exp() * k3(tokens)


def with_gradient_of_k2(estimator: RegularizerFn) -> RegularizerFn:
    def penalty(tokens: Tokens) -> Tensor:
        square_T = k2(tokens)
        return square_T - square_T.detach() + estimator(tokens).detach()

    return penalty


def _distance(tokens: Tokens) -> Tensor:
    assert tokens.reference_logprobs is not None, "a KL to the reference needs reference log-probabilities"
    return bounded(tokens.policy_logprobs - tokens.reference_logprobs)


KL_ESTIMATORS: dict[str, RegularizerFn] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3_is": k3_is,
    "k1+": with_gradient_of_k2(k1),
    "k3+": with_gradient_of_k2(k3),
}

REGULARIZERS: dict[str, Callable[..., Regularizer]] = {"kl": kl, "entropy_bonus": entropy_bonus}
