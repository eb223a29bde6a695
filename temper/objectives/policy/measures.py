"""What the policy loss measures on its way: clipping, distance to other policies, agreement with the sampler.

Owns: the definitions of these metrics, as sums that merge (metrics.py). Refuses: the loss (objective.py).
Shapes: _T drawn tokens of one microbatch, _S its trajectories.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from temper.objectives.metrics import MOMENTS, MetricSums, largest, log_histogram, mean_sums, smallest
from temper.objectives.tokens import Tokens, bounded


def clip_sums(tokens: Tokens, log_ratio_T: Tensor, clipped_T: Tensor) -> MetricSums:
    """Shares of tokens whose ratio was bounded, by what the bound did.

    Not "outside the band": a token that moved against its advantage is outside and keeps its gradient.
    """
    is_above_T = log_ratio_T > 0
    is_good_T, is_bad_T = tokens.advantages > 0, tokens.advantages < 0
    return mean_sums(
        {
            "policy/clip_frac_high": clipped_T & is_good_T & is_above_T,
            "policy/clip_frac_low": clipped_T & is_bad_T & ~is_above_T,
            "policy/dual_clip_frac": clipped_T & is_bad_T & is_above_T,
            "policy/gate_mask_frac": clipped_T,
        }
    )


def policy_sums(tokens: Tokens) -> MetricSums:
    log_ratio_T = bounded(tokens.policy_logprobs - tokens.proximal_logprobs)
    ratio_T = log_ratio_T.exp()
    means = {
        "policy/ratio_mean": ratio_T,
        "policy/kl_old_k1": -log_ratio_T,
        "policy/kl_old_k3": ratio_T - 1 - log_ratio_T,
    }
    if tokens.entropy is not None:
        means["policy/entropy"] = tokens.entropy
    if tokens.router_shift is not None:
        means["route/shift"] = tokens.router_shift
    if tokens.reference_logprobs is not None:
        distance_T = bounded(tokens.over_vocabulary - tokens.reference_logprobs)
        means["policy/kl_ref_k1"] = distance_T
        means["policy/kl_ref_k3"] = torch.exp(-distance_T) - 1 + distance_T
    extrema = MetricSums(
        maxima={"policy/ratio_max": largest(ratio_T)},
        minima={"policy/ratio_min": smallest(ratio_T)},
        histograms={"policy/ratio_p99": log_histogram(log_ratio_T)},
    )
    return mean_sums(means).merge(extrema).merge(_reference_sums(tokens))


def _reference_sums(tokens: Tokens) -> MetricSums:
    """Distance of whole trajectories from the reference: what adaptive coefficients look at."""
    if tokens.reference_logprobs is None:
        return MetricSums()
    distance_S = tokens.sum_by_trajectory(tokens.over_vocabulary - tokens.reference_logprobs)
    has_tokens_S = tokens.sum_by_trajectory(torch.ones_like(tokens.weights)) > 0
    return mean_sums({"policy/kl_ref_sequence": distance_S}, count=has_tokens_S.sum())


def mismatch_sums(tokens: Tokens) -> MetricSums:
    """How far the sampler and the trainer at batch start disagree about the drawn tokens."""
    log_rho_T = bounded(tokens.proximal_logprobs - tokens.behavior_logprobs)
    rho_T = log_rho_T.exp()
    by_token = mean_sums(
        {
            "mismatch/logp_abs_mean": log_rho_T.abs(),
            "mismatch/kl_k1": -log_rho_T,
            "mismatch/kl_k3": rho_T - 1 - log_rho_T,
            "mismatch/chi2_token": rho_T.square() - 1,
            **_moments(tokens),
        }
    )
    has_tokens_S = tokens.sum_by_trajectory(torch.ones_like(tokens.weights)) > 0
    train_S, rollout_S = (
        tokens.mean_by_trajectory(x.double()) for x in (tokens.proximal_logprobs, tokens.behavior_logprobs)
    )
    by_trajectory = mean_sums(
        {
            "mismatch/ppl_train": (-train_S).exp() * has_tokens_S,
            "mismatch/ppl_rollout": (-rollout_S).exp() * has_tokens_S,
            "mismatch/log_ppl_diff": rollout_S - train_S,
        },
        count=has_tokens_S.sum(),
    )
    extrema = MetricSums(maxima={"mismatch/logp_abs_max": largest(log_rho_T.abs())})
    return by_token.merge(by_trajectory).merge(extrema)


def _moments(tokens: Tokens) -> dict[str, Tensor]:
    """What the correlation of the drawn tokens' probabilities, sampler against trainer, is made of."""
    mu_T, pi_T = (x.double().exp() for x in (tokens.behavior_logprobs, tokens.proximal_logprobs))
    columns = (mu_T, pi_T, mu_T.square(), pi_T.square(), mu_T * pi_T)
    return {f"mismatch/moment_{name}": column_T for name, column_T in zip(MOMENTS, columns, strict=True)}


def correction_sums(tokens: Tokens, acted: Mapping[str, Tensor], multiplier_T: Tensor) -> MetricSums:
    means = {f"mismatch/{name}_frac": acted_T for name, acted_T in acted.items()}
    is_acted_T = torch.stack(list(acted.values())).any(0)
    means["mismatch/clip_frac"] = is_acted_T & (multiplier_T != 0)
    means["mismatch/reject_frac_token"] = multiplier_T == 0
    means["mismatch/weight_mean"] = multiplier_T
    means["mismatch/weight_square_mean"] = multiplier_T.double().square()
    counts_S = tokens.sum_by_trajectory(torch.ones_like(multiplier_T))
    kept_S = tokens.sum_by_trajectory((multiplier_T != 0).to(multiplier_T.dtype))
    rejected_S = (kept_S == 0) & (counts_S > 0)
    by_trajectory = mean_sums({"mismatch/reject_frac_seq": rejected_S}, count=(counts_S > 0).sum())
    return mean_sums(means).merge(by_trajectory)
