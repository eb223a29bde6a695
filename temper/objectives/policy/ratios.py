"""How far the policy has moved from where the batch started: log pi - log pi_old, per token or per trajectory.

Owns: the level of the ratio. Refuses: what is done with it (gates.py). Sums run over drawn tokens only.
A sequence-level ratio belongs to sequence_mean weighting; with token_mean it would weigh trajectories by length.
Shapes: _T drawn tokens, _S trajectories, _TLE the experts E that each layer L had chosen for a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from temper.objectives.advantage.forks import fork_tokens, require_quantile
from temper.objectives.factor import factor, require
from temper.objectives.objective import Ratio
from temper.objectives.tokens import Tokens, bounded

RatioFn = Callable[[Tokens], Tensor]


@factor()
def token() -> RatioFn:
    """log r_t = log pi_t - log pi_old_t."""
    return lambda tokens: bounded(_log_ratio(tokens))


@factor()
def sequence_geometric() -> RatioFn:
    """log s = mean_t (log pi_t - log pi_old_t), the same for all tokens of a trajectory; length-free.

    GSPO, Zheng et al. 2025.
    """

    def log_ratio(tokens: Tokens) -> Tensor:
        mean_S = tokens.mean_by_trajectory(_log_ratio(tokens))
        return bounded(mean_S)[tokens.trajectory_ids]

    return log_ratio


@factor()
def sequence_geometric_token() -> RatioFn:
    """Value of sequence_geometric, gradient of each token's own log-probability: s_t = sg[s] pi_t / sg[pi_t].

    Allows advantages that differ inside a trajectory. GSPO-token, Zheng et al. 2025.
    """

    def log_ratio(tokens: Tokens) -> Tensor:
        mean_S = tokens.mean_by_trajectory(_log_ratio(tokens).detach())
        own_T = tokens.policy_logprobs - tokens.policy_logprobs.detach()
        return bounded(mean_S)[tokens.trajectory_ids] + own_T

    return log_ratio


@factor()
def sequence_product() -> RatioFn:
    """log w = sum_t (log pi_t - log pi_old_t): the likelihood ratio of the whole trajectory."""

    def log_ratio(tokens: Tokens) -> Tensor:
        sum_S = tokens.sum_by_trajectory(_log_ratio(tokens))
        return bounded(sum_S)[tokens.trajectory_ids]

    return log_ratio


@factor(needs=("router",), experimental="known from the paper's abstract and third-party code only")
def router_shift(floor: float = 0.8) -> RatioFn:
    """log r_t + log g_t, g_t = sg[max(exp(-D_t), floor)], D_t = router_deviation.

    Tokens whose experts changed weigh less, before clipping and aggregation. RSPO, arXiv 2510.23027.
    """
    require(0 < floor <= 1, f"router_shift: floor={floor} must be above 0 and at most 1, e.g. floor=0.8")

    def log_ratio(tokens: Tokens) -> Tensor:
        assert tokens.router_shift is not None, "router_shift needs the router's deviation at each token"
        return bounded(_log_ratio(tokens) + (-tokens.router_shift).clamp(min=math.log(floor)))

    return log_ratio


def router_deviation(old_logprobs_TLE: Tensor, new_logprobs_TLE: Tensor) -> Tensor:
    """[T] mean over layers of the mean over the experts chosen before of |log q - log q_old|; without gradient.

    Both hold the router's log-probabilities of the experts that were active when the batch started, so experts that
    only the current router chooses do not count. RSPO, arXiv 2510.23027.
    """
    return (new_logprobs_TLE - old_logprobs_TLE).detach().abs().mean((1, 2))


@factor(needs=("policy_top_k",))
def top_k_spread(k: int = 3, share: float = 0.01, quantile: float = 0.8) -> RatioFn:
    """log of (1 - e) r_t + (e/K) sum_k sg[r_t / r_k] r_k: value of log r_t, part of its gradient on the top K tokens.

    e = share on fork tokens (forks.py) of positive advantage, else 0: a right answer then also raises its rivals, and
    pass@k survives. r_k is the ratio of the k-th most likely token when the batch started; sg[r_t / r_k] r_k has the
    gradient r_t d(log pi_k), so what the old policy thought of that token cancels.
    SimKO, arXiv 2510.14807.
    """
    require(k >= 1, f"top_k_spread: k={k} must be at least 1 token, e.g. k=3")
    require(0 <= share <= 1, f"top_k_spread: share={share} must be between 0 and 1, e.g. share=0.01")
    require_quantile("top_k_spread", quantile)

    def log_ratio(tokens: Tokens) -> Tensor:
        assert tokens.top is not None, "top_k_spread needs the most likely tokens"
        assert tokens.top.ids.shape[1] >= k, f"top_k_spread has {tokens.top.ids.shape[1]} likely tokens and needs {k}"
        top_TK, own_T = tokens.top.policy_logprobs[:, :k], tokens.policy_logprobs
        # Zero in value, for it only redirects gradient.
        redirected_T = (top_TK - top_TK.detach()).mean(1) - (own_T - own_T.detach())
        is_spread_T = (tokens.advantages > 0) & fork_tokens(tokens, quantile)
        return bounded(_log_ratio(tokens) + torch.where(is_spread_T, share * redirected_T, 0.0))

    return log_ratio


def _log_ratio(tokens: Tokens) -> Tensor:
    return tokens.policy_logprobs - tokens.proximal_logprobs


RATIOS: dict[str, Callable[..., Ratio]] = {
    "token": token,
    "sequence_geometric": sequence_geometric,
    "sequence_geometric_token": sequence_geometric_token,
    "sequence_product": sequence_product,
    "router_shift": router_shift,
    "top_k_spread": top_k_spread,
}
