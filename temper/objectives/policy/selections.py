"""Which tokens the policy loss is taken on, by what the policy thinks of them: entropy, covariance with the advantage.

Owns: keep rules that do not concern the sampler. Refuses: denominators, as corrections do (corrections.py).
Every rule chooses on the whole batch; a choice per microbatch would make the gradient depend on the partition.
Shapes: _N drawn tokens of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from temper.objectives.factor import factor, require
from temper.objectives.objective import BatchMeasure, PolicyObjective, SamplerCorrection
from temper.objectives.policy.corrections import CorrectionFn, kept_as_measured
from temper.objectives.tokens import Tokens


@factor(needs=("batch",))
def top_entropy(share: float = 0.2) -> CorrectionFn:
    """Keeps tokens whose entropy is at least the (1 - share) quantile of the batch: the forks of the reasoning.

    Beyond the 80/20 rule, arXiv 2506.01939; TRL.
    """
    require(0 < share <= 1, f"top_entropy: share={share} must lie in (0, 1], e.g. share=0.2")

    def measure(whole: Tokens, objective: PolicyObjective) -> Tensor:
        assert whole.entropy is not None, "top_entropy needs the entropy of each position"
        if not len(whole):
            return torch.ones_like(whole.weights)
        return (whole.entropy >= _quantile(whole.entropy, 1 - share)).to(whole.weights.dtype)

    return BatchMeasure("top_entropy", measure, kept_as_measured)


@factor(needs=("batch",))
def clip_cov(share: float = 2e-4, low: float = 1.0, high: float = 5.0) -> CorrectionFn:
    """Clip-Cov: drops max(1, floor(share N)) tokens, drawn at random among those with low < cov < high that the gate
    did not clip already. They are what collapses entropy.

    cov_t = (A_t - mean A)(log pi_t - mean log pi), means over the whole batch. The draw depends on the step's seed and
    on the batch alone. Entropy Mechanism, arXiv 2505.22617; verl.
    """
    require(0 < share <= 1, f"clip_cov: share={share} must lie in (0, 1], e.g. share=2e-4")
    require(low < high, f"clip_cov: the band from {low} to {high} is empty, e.g. low=1.0, high=5.0")

    def measure(whole: Tokens, objective: PolicyObjective) -> Tensor:
        for part in (objective.ratio, objective.gate):
            require(
                not part.needs & {"sampler_top_k", "policy_top_k"},
                f"clip_cov asks what the gate clips in the whole batch, where the likeliest tokens that {part.name} "
                f'reads are not kept. Use another one, e.g. ratio = "token" and gate = "clip".',
            )
        cov_N = covariances(whole)
        is_clipped_N = objective.gate(whole, objective.ratio(whole)).clipped
        candidates = ((cov_N > low) & (cov_N < high) & ~is_clipped_N).nonzero()[:, 0].cpu()
        generator = torch.Generator().manual_seed(whole.seed)
        shuffled = candidates[torch.randperm(len(candidates), generator=generator)]
        is_kept_N = torch.ones_like(whole.weights)
        is_kept_N[shuffled[: chosen_count(share, len(whole))].to(is_kept_N.device)] = 0.0
        return is_kept_N

    return BatchMeasure("clip_cov", measure, kept_as_measured)


def covariances(whole: Tokens) -> Tensor:
    """[N] each token's part of the covariance between advantage and log-probability, in float64."""
    advantages_N, logprobs_N = whole.advantages.double(), whole.policy_logprobs.detach().double()
    return (advantages_N - advantages_N.mean()) * (logprobs_N - logprobs_N.mean())


def chosen_count(share: float, total: int) -> int:
    """At least one, or the tiny shares in use would choose nothing in small batches."""
    return max(1, math.floor(share * total))


def _quantile(values_N: Tensor, level: float) -> Tensor:
    """Linear between neighbours, as torch.quantile, which refuses more than 16 million values."""
    ascending_N = values_N.sort().values
    position = level * (len(values_N) - 1)
    below = math.floor(position)
    above = min(below + 1, len(values_N) - 1)
    return torch.lerp(ascending_N[below], ascending_N[above], position - below)


SELECTIONS: dict[str, Callable[..., SamplerCorrection]] = {"top_entropy": top_entropy, "clip_cov": clip_cov}
