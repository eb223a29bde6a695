"""One objective for every algorithm: credit x ratio x gate x correction x weighting x regulariser.

Owns: what factors take and return, how they multiply, what is measured. Refuses: the factors themselves, and any
denominator: `weights` already hold one over the whole batch's, so losses of microbatches simply add.
Shapes: _T drawn tokens of one microbatch, _S its trajectories, _B trajectories of a batch, _N drawn tokens of a batch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from temper.errors import UserError
from temper.objectives.factor import Factor
from temper.objectives.metrics import MetricSums, largest, mean_sums, smallest
from temper.types import Microbatch, require_parallel

MAX_LOG_RATIO = 20.0
"""exp(20) is far beyond any trust region and still finite in float32, also when squared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The tokens one microbatch drew, and nothing else: there is no mask to forget.

    All rows of a trajectory are here, so sequence-level sums are complete.
    """

    policy_logprobs: Tensor
    """The only field with a gradient, besides entropy."""
    proximal_logprobs: Tensor
    """By the trainer when the batch started. With one update per batch: the detached policy."""
    behavior_logprobs: Tensor
    """As sampled."""
    advantages: Tensor
    weights: Tensor
    """Share of each token in the loss of the whole batch."""
    trajectory_ids: Tensor
    """From 0 to num_trajectories - 1."""
    num_trajectories: int
    """May exceed the number of trajectories that have tokens here."""
    num_batch_tokens: int
    """Drawn tokens of the whole optimiser step, over all microbatches and ranks."""
    versions: Tensor
    reference_logprobs: Tensor | None = None
    """None: the objective does not need them."""
    entropy: Tensor | None = None
    """Of the whole next-token distribution at each position. None: not computed."""

    def __post_init__(self) -> None:
        constants = ["proximal_logprobs", "behavior_logprobs", "advantages", "weights", "trajectory_ids", "versions"]
        constants += ["reference_logprobs"] if self.reference_logprobs is not None else []
        require_parallel(self, "policy_logprobs", *constants, *(["entropy"] if self.entropy is not None else []))
        for name in constants:
            # A proximal policy that was not detached gives ratio 1 with gradient 0: training runs and learns nothing.
            assert not getattr(self, name).requires_grad, f"{name} must not carry a gradient"

    @staticmethod
    def of(
        microbatch: Microbatch, policy_logprobs: Tensor, *, num_batch_tokens: int, entropy: Tensor | None = None
    ) -> Tokens:
        """The drawn tokens of a microbatch; `policy_logprobs` and `entropy` hold those tokens only, in its order."""
        drawn_T = microbatch.loss_mask.bool()
        proximal, reference = microbatch.proximal_logprobs, microbatch.reference_logprobs
        return Tokens(
            policy_logprobs=policy_logprobs,
            proximal_logprobs=policy_logprobs.detach() if proximal is None else proximal[drawn_T],
            behavior_logprobs=microbatch.behavior_logprobs[drawn_T],
            advantages=microbatch.advantages[drawn_T],
            weights=microbatch.weights[drawn_T],
            trajectory_ids=microbatch.trajectory_ids[drawn_T],
            num_trajectories=len(microbatch.lengths),
            num_batch_tokens=num_batch_tokens,
            versions=microbatch.versions[drawn_T],
            reference_logprobs=None if reference is None else reference[drawn_T],
            entropy=entropy,
        )

    def sum_by_trajectory(self, values_T: Tensor) -> Tensor:
        return values_T.new_zeros(self.num_trajectories).index_add(0, self.trajectory_ids, values_T)

    def mean_by_trajectory(self, values_T: Tensor) -> Tensor:
        counts_S = self.sum_by_trajectory(torch.ones_like(values_T))
        return self.sum_by_trajectory(values_T) / counts_S.clamp(min=1)


@dataclass(frozen=True, slots=True)
class Gain:
    """What a gate returns: larger is better."""

    value: Tensor
    clipped: Tensor
    """True where the gate bounded the ratio. Metrics split it by the sign of the advantage."""


@dataclass(frozen=True, slots=True)
class Correction:
    """What a sampler correction returns."""

    multiplier: Tensor
    """Detached; 0 drops the token from the numerator, never from a denominator."""
    acted: Tensor
    """True where the rule truncated or rejected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What advantages are made of: the scored trajectories of one whole batch, on the CPU in float64.

    Unscorable members are not in it: they enter no mean and get no credit.
    """

    rewards: Tensor
    """[B]"""
    group_ids: Tensor
    """[B] ints from 0; one group is one draw of one task."""
    lengths: Tensor
    """[B] drawn tokens, at least 1 each."""
    is_truncated: Tensor
    """[B]"""
    max_new_tokens: int
    reference_log_ratio: Tensor | None = None
    """[N] proximal minus reference log-probability, trajectory after trajectory. None: no factor needs it."""

    def __post_init__(self) -> None:
        require_parallel(self, "rewards", "group_ids", "lengths", "is_truncated")


Shaping = Factor[[Credit], Tensor]
"""Rewards [B] in place of those in the credit."""
Advantage = Factor[[Credit], Tensor]
"""Per trajectory [B], or per drawn token [N] for estimators that give credit inside a trajectory."""
Ratio = Factor[[Tokens], Tensor]
"""Log ratio [T], bounded by MAX_LOG_RATIO."""
Gate = Factor[[Tokens, Tensor], Gain]
SamplerCorrection = Factor[[Tokens], Correction]
Weighting = Factor[[Tensor, Tensor, int], Tensor]
"""(lengths [B], group ids [B], max_new_tokens) -> weight of each token of a trajectory [B]. Length 0 counts nowhere."""
Regularizer = Factor[[Tokens], Tensor]
"""A scalar to add to the loss, holding its own denominator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A point in the product space. A named algorithm is one of these (presets.py)."""

    name: str
    advantage: Advantage
    ratio: Ratio
    gate: Gate
    weighting: Weighting
    shaping: tuple[Shaping, ...] = ()
    """Applied in order, before the advantage."""
    corrections: tuple[SamplerCorrection, ...] = ()
    """Multiplied; keep rules therefore combine by "and"."""
    regularizers: tuple[Regularizer, ...] = ()
    wants: frozenset[str] = frozenset()
    """Procedures outside the loss that belong to the algorithm: "dynamic_sampling", "overlong_shaping"."""
    formula: str = ""
    source: str = ""
    note: str = ""
    """What a user should know before choosing it."""
    experimental: bool = False
    """True when a constant or the form itself is not established by public code."""

    def __post_init__(self) -> None:
        for kind in ("shaping", "corrections", "regularizers"):
            names = [factor.name for factor in getattr(self, kind)]
            if len(set(names)) < len(names):
                raise UserError(f"objective {self.name}: {kind} = {names} names one twice. Name each at most once.")

    @property
    def factors(self) -> tuple[Factor[Any, Any], ...]:
        single = (self.advantage, self.ratio, self.gate, self.weighting)
        return (*self.shaping, *single, *self.corrections, *self.regularizers)

    @property
    def needs(self) -> frozenset[str]:
        """Which passes have to run: "reference", "proximal", "entropy"."""
        return frozenset().union(*(factor.needs for factor in self.factors))

    @property
    def min_group(self) -> int:
        return max(factor.min_group for factor in self.factors)


def advantages_of(objective: Objective, credit: Credit) -> Tensor:
    """Shapes the rewards, then assigns credit: [B] per trajectory or [N] per drawn token."""
    for shape in objective.shaping:
        credit = dataclasses.replace(credit, rewards=shape(credit))
    return objective.advantage(credit)


def objective_loss(objective: Objective, tokens: Tokens) -> tuple[Tensor, MetricSums]:
    """This microbatch's part of the loss, and sums for its metrics.

    loss = -sum(gain * correction * weight) + regularisers. Parts of all microbatches and ranks add up to the loss of
    the batch; a microbatch without drawn tokens gives a zero that is still connected to the graph, so that every rank
    runs its backward pass.
    """
    log_ratio_T = objective.ratio(tokens)
    gain = objective.gate(tokens, log_ratio_T)
    corrections = {correct.name: correct(tokens) for correct in objective.corrections}
    multiplier_T = torch.ones_like(tokens.weights)
    for correction in corrections.values():
        multiplier_T = multiplier_T * correction.multiplier
    loss = policy_loss = -(gain.value * multiplier_T * tokens.weights).sum()
    terms = {"loss/policy": policy_loss}
    for regularizer in objective.regularizers:
        penalty = regularizer(tokens)
        loss = loss + penalty
        terms[f"loss/{regularizer.name}"] = penalty
    with torch.no_grad():
        metrics = MetricSums(totals={name: term.detach().double() for name, term in terms.items()})
        for part in (_clip_sums(tokens, log_ratio_T, gain), _policy_sums(tokens), _mismatch_sums(tokens)):
            metrics = metrics.merge(part)
        if corrections:
            metrics = metrics.merge(_correction_sums(tokens, corrections, multiplier_T))
    return loss, metrics


def bounded(log_ratio: Tensor) -> Tensor:
    """Log ratio that is safe to exponentiate. Sums over long sequences reach 1000, and exp of that is infinite."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clip_sums(tokens: Tokens, log_ratio_T: Tensor, gain: Gain) -> MetricSums:
    """Shares of tokens whose ratio was bounded, by what the bound did.

    Not "outside the band": a token that moved against its advantage is outside and keeps its gradient.
    """
    is_above_T = log_ratio_T > 0
    is_good_T, is_bad_T = tokens.advantages > 0, tokens.advantages < 0
    return mean_sums(
        {
            "policy/clip_frac_high": gain.clipped & is_good_T & is_above_T,
            "policy/clip_frac_low": gain.clipped & is_bad_T & ~is_above_T,
            "policy/dual_clip_frac": gain.clipped & is_bad_T & is_above_T,
        }
    )


def _policy_sums(tokens: Tokens) -> MetricSums:
    log_ratio_T = bounded(tokens.policy_logprobs - tokens.proximal_logprobs)
    ratio_T = log_ratio_T.exp()
    means = {
        "policy/ratio_mean": ratio_T,
        "policy/kl_old_k1": -log_ratio_T,
        "policy/kl_old_k3": ratio_T - 1 - log_ratio_T,
    }
    if tokens.entropy is not None:
        means["policy/entropy"] = tokens.entropy
    if tokens.reference_logprobs is not None:
        distance_T = bounded(tokens.policy_logprobs - tokens.reference_logprobs)
        means["policy/kl_ref_k1"] = distance_T
        means["policy/kl_ref_k3"] = torch.exp(-distance_T) - 1 + distance_T
    extrema = MetricSums(maxima={"policy/ratio_max": largest(ratio_T)}, minima={"policy/ratio_min": smallest(ratio_T)})
    return mean_sums(means).merge(extrema)


def _mismatch_sums(tokens: Tokens) -> MetricSums:
    """How far the sampler and the trainer at batch start disagree about the drawn tokens."""
    log_rho_T = bounded(tokens.proximal_logprobs - tokens.behavior_logprobs)
    rho_T = log_rho_T.exp()
    by_token = mean_sums(
        {
            "mismatch/logp_abs_mean": log_rho_T.abs(),
            "mismatch/kl_k1": -log_rho_T,
            "mismatch/kl_k3": rho_T - 1 - log_rho_T,
            "mismatch/chi2_token": rho_T.square() - 1,
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


def _correction_sums(tokens: Tokens, corrections: dict[str, Correction], multiplier_T: Tensor) -> MetricSums:
    means = {f"mismatch/{name}_frac": correction.acted for name, correction in corrections.items()}
    means["mismatch/reject_frac_token"] = multiplier_T == 0
    means["mismatch/weight_mean"] = multiplier_T
    means["mismatch/weight_square_mean"] = multiplier_T.double().square()
    counts_S = tokens.sum_by_trajectory(torch.ones_like(multiplier_T))
    kept_S = tokens.sum_by_trajectory((multiplier_T != 0).to(multiplier_T.dtype))
    rejected_S = (kept_S == 0) & (counts_S > 0)
    by_trajectory = mean_sums({"mismatch/reject_frac_seq": rejected_S}, count=(counts_S > 0).sum())
    return mean_sums(means).merge(by_trajectory)
