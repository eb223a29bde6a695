"""How far the policy has moved from where the batch started: log pi - log pi_old, per token or per trajectory.

Owns: the level of the ratio. Refuses: what is done with it (gates.py). Sums run over drawn tokens only.
A sequence-level ratio belongs to sequence_mean weighting; with token_mean it would weigh trajectories by length.
Shapes: _T drawn tokens, _S trajectories.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from temper.objectives.factor import factor
from temper.objectives.objective import Ratio, Tokens, bounded

RatioFn = Callable[[Tokens], Tensor]


@factor()
def token() -> RatioFn:
    """log r_t = log pi_t - log pi_old_t. Specification 1.4."""
    return lambda tokens: bounded(_log_ratio(tokens))


@factor()
def sequence_geometric() -> RatioFn:
    """log s = mean_t (log pi_t - log pi_old_t), the same for all tokens of a trajectory; length-free.

    GSPO, Zheng et al. 2025. Specification 1.4.
    """

    def log_ratio(tokens: Tokens) -> Tensor:
        mean_S = tokens.mean_by_trajectory(_log_ratio(tokens))
        return bounded(mean_S)[tokens.trajectory_ids]

    return log_ratio


@factor()
def sequence_geometric_token() -> RatioFn:
    """Value of sequence_geometric, gradient of each token's own log-probability: s_t = sg[s] pi_t / sg[pi_t].

    Allows advantages that differ inside a trajectory. GSPO-token, Zheng et al. 2025. Specification 1.4.
    """

    def log_ratio(tokens: Tokens) -> Tensor:
        mean_S = tokens.mean_by_trajectory(_log_ratio(tokens).detach())
        own_T = tokens.policy_logprobs - tokens.policy_logprobs.detach()
        return bounded(mean_S)[tokens.trajectory_ids] + own_T

    return log_ratio


@factor()
def sequence_product() -> RatioFn:
    """log w = sum_t (log pi_t - log pi_old_t): the likelihood ratio of the whole trajectory. Specification 1.4."""

    def log_ratio(tokens: Tokens) -> Tensor:
        sum_S = tokens.sum_by_trajectory(_log_ratio(tokens))
        return bounded(sum_S)[tokens.trajectory_ids]

    return log_ratio


def _log_ratio(tokens: Tokens) -> Tensor:
    return tokens.policy_logprobs - tokens.proximal_logprobs


RATIOS: dict[str, Callable[..., Ratio]] = {
    "token": token,
    "sequence_geometric": sequence_geometric,
    "sequence_geometric_token": sequence_geometric_token,
    "sequence_product": sequence_product,
}
