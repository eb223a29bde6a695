"""One objective for every algorithm: credit x ratio x gate x correction x weighting x regulariser.

Owns: what factors take and return, and how they multiply. Refuses: the factors themselves, and any denominator:
`weights` already hold one over the whole batch's, so losses of microbatches simply add.
Shapes: _T drawn tokens of one microbatch, _B trajectories of a batch, _N drawn tokens of a batch.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from temper.errors import UserError
from temper.objectives.advantage.credit import Advantages, Credit, Extent
from temper.objectives.factor import Factor, factor
from temper.objectives.metrics import MetricSums
from temper.objectives.policy.measures import clip_sums, correction_sums, mismatch_sums, policy_sums
from temper.objectives.tokens import Tokens

Arguments = ParamSpec("Arguments")
Output = TypeVar("Output")
LossFn = Callable[[Tokens], tuple[Tensor, MetricSums]]
State = Mapping[str, float]
"""What controllers remember. A key that is a factor's name scales that factor's coefficient."""


@dataclass(frozen=True, slots=True)
class Gain:
    """What a gate returns: larger is better."""

    value: Tensor
    clipped: Tensor
    """True where the gate bounded the ratio. Metrics split it by the sign of the advantage."""


@dataclass(frozen=True, slots=True)
class Correction:
    """What a correction returns."""

    multiplier: Tensor
    """Detached; 0 drops the token from the numerator, never from a denominator."""
    acted: Tensor
    """True where the rule truncated or rejected."""


@dataclass(frozen=True, slots=True)
class BatchMeasure(Generic[Output]):
    """Mathematics in two parts: one number per token from the whole batch, then its use in a microbatch.

    A quantile, a covariance or a mean taken per microbatch would make the gradient depend on the partition.
    """

    name: str
    """Name of the factor."""
    measure: Callable[[Tokens, Any], Tensor]
    """Whole batch and the objective of which it is a factor -> [N], in the same order for every partition. Policy
    log-probabilities are there, without gradient, when the factor needs "batch"; else they are NaN."""
    use: Callable[[Tokens, Tensor], Output]

    def __call__(self, tokens: Tokens) -> Output:
        return self.use(tokens, tokens.measured[self.name])


@dataclass(frozen=True, slots=True)
class SlopedWeighting:
    """A weighting with a number that is learned: the weights, and how their logarithms change with that number."""

    weights: Callable[[Extent], Tensor]
    slopes: Callable[[Extent], Tensor]
    """[B] d log(weight) / d number. The loss then reports its own derivative as loss/weight_slope."""

    def __call__(self, extent: Extent) -> Tensor:
        return self.weights(extent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When a reference rule is asked, after every step."""

    step: int
    """Steps of the run so far."""
    stalled_evaluations: int
    """Held-out evaluations since the best one, or since the reference last moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refresh:
    """How a reference moves: reference <- mix * policy + (1 - mix) * reference."""

    mix: float
    resets_optimizer: bool


FisherProduct = Callable[[Tensor], Tensor]
"""v -> F v, with F the Fisher matrix of the policy at the start of the step."""

Shaping = Factor[[Credit], Credit]
"""Rewards changed before anything is compared."""
Advantage = Factor[[Credit], Tensor]
"""Per trajectory [B], or per drawn token [N] for estimators that give credit inside a trajectory."""
Normalizer = Factor[[Credit, Advantages], Advantages]
Proximal = Factor[[Tokens], Tensor]
"""Log-probabilities [T] of the policy that ratios are taken against."""
Ratio = Factor[[Tokens], Tensor]
"""Log ratio [T], bounded by MAX_LOG_RATIO."""
Gate = Factor[[Tokens, Tensor], Gain]
Emphasis = Factor[[Tokens], Tensor]
"""Advantages [T] in place of those given, by what the policy is now."""
SamplerCorrection = Factor[[Tokens], Correction]
Weighting = Factor[[Extent], Tensor]
"""Weight of each token of a trajectory [B], one over its denominator included."""
Regularizer = Factor[[Tokens], Tensor]
"""A scalar to add to the loss, holding its own denominator."""
Critic = Factor[[Credit], Tensor]
"""Targets [N] for the values."""
Controller = Factor[[State, State], State]
"""(what it remembers, metrics of the step) -> what it remembers next; ({}, {}) -> how it starts."""
ReferenceRule = Factor[[Moment], Refresh | None]
ConstrainedStep = Factor[[FisherProduct, Tensor], Tensor]
"""(Fisher product, gradient of the gain) -> the full step, before the line search."""
RowKind = Literal["texts", "pairs", "labelled", "steps", "wins"]
"""What a loss is computed on: given texts; an answer beside a worse one; answers that are good or bad; solutions with a
label for every step; samples, each with the share of its opponents that it beats."""


@dataclass(frozen=True)
class Loss(Factor[[Tokens], tuple[Tensor, MetricSums]]):
    """A loss that is not a policy gradient: this microbatch's part of it, and sums for its metrics."""

    reads: RowKind = field(compare=False)
    opponent: float | str | None = field(compare=False, default=None)
    """Share of the reference in the opponent that samples are compared with, or the argument that gives it. None: there
    is no opponent."""

    @property
    def opponent_share(self) -> float | None:
        """1: the opponent is the reference, 0: the policy itself. None: there is none."""
        return float(self.argument(self.opponent)) if isinstance(self.opponent, str) else self.opponent

    @property
    def is_weighed(self) -> bool:
        """Whether tokens have the weights of a weighting; pairs and scores all count the same."""
        return self.reads == "texts"


def loss_on(
    reads: RowKind, *, needs: Iterable[str] = (), min_group: int = 1, opponent: float | str | None = None
) -> Callable[[Callable[Arguments, LossFn]], Callable[Arguments, Loss]]:
    """Decorates a builder as `factor` does, and declares the rows that its loss reads."""

    def decorate(build: Callable[Arguments, LossFn]) -> Callable[Arguments, Loss]:
        build_factor = factor(needs=needs, min_group=min_group)(build)

        @functools.wraps(build)
        def built(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Loss:
            return dataclasses.replace(loss_of(build_factor(*args, **kwargs), reads), opponent=opponent)

        return built

    return decorate


def loss_of(rule: Factor[Any, Any], reads: RowKind, run: LossFn | None = None) -> Loss:
    """The loss with a rule's name, arguments and needs; `run` stands in place of the rule's own mathematics."""
    return Loss(rule.name, rule.arguments, rule.needs, rule.min_group, rule.experimental, run or rule.run, reads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(ABC):
    """What every algorithm has, whichever of the two types it is: PolicyObjective or DirectLoss."""

    name: str
    weighting: Weighting | None = None
    """Weights of tokens. None: rows of the loss all count the same."""
    controllers: tuple[Controller, ...] = ()
    reference: ReferenceRule | None = None
    """When a reference moves. None: never."""
    wants: frozenset[str] = frozenset()
    """Procedures outside the loss that belong to the algorithm: "dynamic_sampling", "overlong_filter" ..."""
    formula: str = ""
    source: str = ""
    note: str = ""
    """What a user should know before choosing it."""
    experimental: str = ""
    """Why a constant or the form itself is not established by public code; empty when it is."""

    def __post_init__(self) -> None:
        for kind, own in ((kind.name, getattr(self, kind.name)) for kind in dataclasses.fields(self)):
            names = [factor.name for factor in own] if isinstance(own, tuple) else []
            if len(set(names)) < len(names):
                raise UserError(f"objective {self.name}: {kind} = {names} names one twice. Name each at most once.")

    @property
    @abstractmethod
    def credit_factors(self) -> tuple[Factor[Any, Any], ...]:
        """What gives credit, before anything is trained."""

    @property
    @abstractmethod
    def loss_factors(self) -> tuple[Factor[Any, Any], ...]:
        """What the loss of a microbatch is made of."""

    @property
    def factors(self) -> tuple[Factor[Any, Any], ...]:
        rules = () if self.reference is None else (self.reference,)
        return (*self.credit_factors, *self.loss_factors, *self.controllers, *rules)

    @property
    def needs(self) -> frozenset[str]:
        """Which passes have to run; keys of factor.NEEDS."""
        return _union(self.factors)

    @property
    def credit_needs(self) -> frozenset[str]:
        """Those that have to run before credit is given."""
        return _union(self.credit_factors)

    def top_k(self, need: str) -> int:
        """How many of the most likely tokens the factors with this need read; 0 when there are none."""
        asking = [dict(factor.arguments) for factor in self.factors if need in factor.needs]
        return max((int(arguments.get("k") or 1) for arguments in asking), default=0)

    @property
    def min_group(self) -> int:
        return max(factor.min_group for factor in self.factors)

    @property
    def why_experimental(self) -> tuple[str, ...]:
        """All reasons, its own and its factors'; empty for an established algorithm."""
        reasons = [f"{factor.name}: {factor.experimental}" for factor in self.factors if factor.experimental]
        return tuple(([self.experimental] if self.experimental else []) + reasons)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective(Objective):
    """A policy gradient: a point in the product space. A named algorithm is one of these (presets/)."""

    advantage: Advantage
    ratio: Ratio
    gate: Gate
    weighting: Weighting
    proximal: Proximal
    """What the ratio is taken against."""
    shaping: tuple[Shaping, ...] = ()
    """Applied in order, before the advantage."""
    normalizers: tuple[Normalizer, ...] = ()
    """Applied in order, after the advantage."""
    emphasis: tuple[Emphasis, ...] = ()
    corrections: tuple[SamplerCorrection, ...] = ()
    """Multiplied; keep rules therefore combine by "and"."""
    regularizers: tuple[Regularizer, ...] = ()
    critic: Critic | None = None
    """None: no critic is trained."""
    step: ConstrainedStep | None = None
    """None: AdamW on the gradient."""

    @property
    def credit_factors(self) -> tuple[Factor[Any, Any], ...]:
        critic = () if self.critic is None else (self.critic,)
        return (*self.shaping, self.advantage, *self.normalizers, *critic)

    @property
    def loss_factors(self) -> tuple[Factor[Any, Any], ...]:
        single = (self.proximal, self.ratio, self.gate, self.weighting)
        step = () if self.step is None else (self.step,)
        return (*single, *self.emphasis, *self.corrections, *self.regularizers, *step)


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectLoss(Objective):
    """A loss of its own in place of credit, ratio and gate: of texts, of pairs, of scores, of the distance from a
    teacher. What rows it reads, the loss declares."""

    loss: Loss

    def __post_init__(self) -> None:
        # By name: with slots the class is made anew, and super() without arguments would look for the old one.
        Objective.__post_init__(self)
        if self.loss.is_weighed == (self.weighting is None):
            raise UserError(
                f"objective {self.name}: loss {self.loss.name} reads {self.loss.reads}, which "
                f"{'need a weighting, e.g. token_mean' if self.loss.is_weighed else 'have no weighting'}"
            )

    @property
    def credit_factors(self) -> tuple[Factor[Any, Any], ...]:
        return ()

    @property
    def loss_factors(self) -> tuple[Factor[Any, Any], ...]:
        return (self.loss,) if self.weighting is None else (self.weighting, self.loss)


def advantages_of(objective: Objective, credit: Credit, is_trained: Tensor | None = None) -> Advantages:
    """Shapes the rewards, assigns credit, normalises it: one advantage per drawn token.

    `is_trained` [B] names the trajectories that may be trained, if not all: the others count in their group's mean, and
    in no statistic over tokens.
    """
    credit = shaped(objective, credit)
    values = objective.advantage(credit) if isinstance(objective, PolicyObjective) else credit.rewards
    # Both shapes are allowed; where B = N every trajectory has one token and they mean the same.
    tokens_N = credit.spread(values) if len(values) == len(credit.rewards) else values
    assert len(tokens_N) == int(credit.lengths.sum()), "advantages must be per trajectory or per drawn token"
    everyone = torch.ones_like(credit.is_truncated)
    advantages = Advantages(tokens=tokens_N, is_kept=everyone if is_trained is None else is_trained)
    for normalize in objective.normalizers if isinstance(objective, PolicyObjective) else ():
        advantages = normalize(credit, advantages)
    return advantages


def targets_of(objective: Objective, credit: Credit) -> Tensor | None:
    """What the critic should have predicted before each token [N]; None without a critic."""
    critic = objective.critic if isinstance(objective, PolicyObjective) else None
    return None if critic is None else critic(shaped(objective, credit))


def shaped(objective: Objective, credit: Credit) -> Credit:
    for shape in objective.shaping if isinstance(objective, PolicyObjective) else ():
        credit = shape(credit)
    return credit


def measures_batch(objective: Objective) -> bool:
    """Whether measure_batch has anything to do."""
    return any(isinstance(factor.run, BatchMeasure) for factor in objective.loss_factors)


def measure_batch(objective: Objective, whole: Tokens) -> dict[str, Tensor]:
    """By factor name: one number per token, from the whole batch of one optimiser step.

    `whole` holds every token of the step, over all microbatches and ranks, in an order that does not depend on how
    they were split.
    """
    with torch.no_grad():
        if isinstance(objective, PolicyObjective):
            whole = _against_proximal(objective, whole)
        parts = [factor.run for factor in objective.loss_factors if isinstance(factor.run, BatchMeasure)]
        return {part.name: part.measure(whole, objective) for part in parts}


def objective_loss(objective: Objective, tokens: Tokens) -> tuple[Tensor, MetricSums]:
    """This microbatch's part of the loss, and sums for its metrics.

    loss = -sum(gain * correction * weight) + regularisers. Parts of all microbatches and ranks add up to the loss of
    the batch; a microbatch without drawn tokens gives a zero that is still connected to the graph, so that every rank
    runs its backward pass.
    """
    if isinstance(objective, DirectLoss):
        return objective.loss(tokens)
    assert isinstance(objective, PolicyObjective), "an objective is one of the two"
    given, tokens = tokens, _against_proximal(objective, tokens)
    for emphasize in objective.emphasis:
        tokens = dataclasses.replace(tokens, advantages=emphasize(tokens))
    log_ratio_T = objective.ratio(tokens)
    gain = objective.gate(tokens, log_ratio_T)
    corrections = {correct.name: correct(tokens) for correct in objective.corrections}
    multiplier_T = torch.ones_like(tokens.weights)
    for correction in corrections.values():
        multiplier_T = multiplier_T * correction.multiplier
    loss = policy_loss = -(gain.value * multiplier_T * tokens.weights).sum()
    terms = {"loss/policy": policy_loss}
    if isinstance(objective.weighting.run, SlopedWeighting) and tokens.weight_slopes is not None:
        terms["loss/weight_slope"] = -(gain.value * multiplier_T * tokens.weights * tokens.weight_slopes).sum()
    for regularizer in objective.regularizers:
        penalty = regularizer(tokens) * tokens.scales.get(regularizer.name, 1.0)
        loss = loss + penalty
        terms[f"loss/{regularizer.name}"] = penalty
    with torch.no_grad():
        metrics = MetricSums(totals={name: term.detach().double() for name, term in terms.items()})
        for part in (clip_sums(tokens, log_ratio_T, gain.clipped), policy_sums(tokens), mismatch_sums(given)):
            metrics = metrics.merge(part)
        if corrections:
            acted = {name: correction.acted for name, correction in corrections.items()}
            metrics = metrics.merge(correction_sums(tokens, acted, multiplier_T))
    return loss, metrics


def control(objective: Objective, state: State, metrics: State) -> dict[str, float]:
    """What all controllers remember after a step. With ({}, {}): how a run starts."""
    following = dict(state)
    for controller in objective.controllers:
        following |= controller(following, metrics)
    return following


def _against_proximal(objective: PolicyObjective, tokens: Tokens) -> Tokens:
    return dataclasses.replace(tokens, proximal_logprobs=objective.proximal(tokens))


def _union(factors: tuple[Factor[Any, Any], ...]) -> frozenset[str]:
    return frozenset().union(*(factor.needs for factor in factors))
