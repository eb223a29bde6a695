"""Preference losses as losses: from the drawn tokens of a microbatch to rules on pairs and labelled completions.

Owns: which two trajectories are a pair, sums over their tokens, and what beta-DPO takes from the whole batch. Refuses:
the rules (preferences.py, unpaired.py, beta_dpo.py) and making rows (stages/preference.py).
Shapes: _T drawn tokens of one microbatch, _S its trajectories, _P its pairs, _N and _B those of a whole batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ParamSpec

import torch
from torch import Tensor

from temper.errors import UserError
from temper.objectives.factor import factor, require
from temper.objectives.losses import preferences, unpaired
from temper.objectives.losses.beta_dpo import MarginState
from temper.objectives.losses.beta_dpo import beta_dpo as choose_pairs
from temper.objectives.losses.preferences import Pairs, Preference, preference_loss, shift_schedule
from temper.objectives.losses.unpaired import LabelledCompletions, labelled_loss, nash_md_losses
from temper.objectives.metrics import MetricSums, mean_sums
from temper.objectives.objective import BatchMeasure, Controller, Loss, Objective, State, loss_of, loss_on
from temper.objectives.tokens import Tokens

Arguments = ParamSpec("Arguments")
Taught = tuple[Tensor, MetricSums]
"""What a direct loss returns: a microbatch's part of the loss, and sums for its metrics."""

MEAN_KEY, STD_KEY = "beta_dpo.mean", "beta_dpo.std"
"""Keys under which margin_memory keeps beta-DPO's moving mean and deviation."""
AVERAGE, DEVIATION = "preference/margin_average", "preference/margin_deviation"


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The trajectories of a microbatch: their tokens lie side by side, in order."""

    counts_S: Tensor

    @staticmethod
    def of(tokens: Tokens) -> Rollouts:
        return Rollouts(torch.unique_consecutive(tokens.trajectory_ids, return_counts=True)[1])

    def sums(self, values_T: Tensor) -> Tensor:
        """[S] in float64: over a thousand tokens float32 loses what a small beta looks at. Segment by segment, because
        adding at places runs in no fixed order on a GPU."""
        values_T = values_T.double()
        if not len(values_T):  # keeps the graph, so that every rank runs its backward pass
            return values_T
        return torch.segment_reduce(values_T, "sum", lengths=self.counts_S)

    def firsts(self, values_T: Tensor) -> Tensor:
        """[S, ...] first entry of each trajectory, for columns that are the same for all of its tokens."""
        return values_T[self.counts_S.cumsum(0) - self.counts_S]

    def spread(self, values_S: Tensor) -> Tensor:
        """[T, ...]"""
        return values_S.repeat_interleave(self.counts_S, dim=0)


@dataclass(frozen=True, slots=True)
class PairSides:
    """Which trajectory of each pair was preferred."""

    rollouts: Rollouts
    chosen_P: Tensor
    """Places among the trajectories."""
    rejected_P: Tensor

    @staticmethod
    def of(tokens: Tokens) -> PairSides:
        """Pairs neighbours, of which one has reward 1 and the other 0. Rows that were packed by group lie like that."""
        assert tokens.rewards is not None, "pairs are told apart by their rewards, and there are none"
        rollouts = Rollouts.of(tokens)
        is_chosen_S = rollouts.firsts(tokens.rewards) > 0.5
        count = len(is_chosen_S)
        # Rows packed one by one would pair a chosen answer with another prompt's: it trains, and learns nonsense.
        is_paired = count % 2 == 0 and bool((is_chosen_S[::2] ^ is_chosen_S[1::2]).all())
        assert is_paired, 'a microbatch holds a chosen and a rejected row of each pair. Pack with together="group"'
        firsts_P = torch.arange(0, count, 2, device=is_chosen_S.device)
        chosen_P = firsts_P + (~is_chosen_S[::2]).long()
        return PairSides(rollouts, chosen_P, 2 * firsts_P + 1 - chosen_P)

    def pairs(self, tokens: Tokens) -> Pairs:
        chosen_P, rejected_P, sums = self.chosen_P, self.rejected_P, self.rollouts.sums
        policy_S, reference = sums(tokens.over_vocabulary), tokens.reference_logprobs
        reference_S = None if reference is None else sums(reference)
        return Pairs(
            chosen_logprobs=policy_S[chosen_P],
            rejected_logprobs=policy_S[rejected_P],
            chosen_lengths=self.rollouts.counts_S[chosen_P],
            rejected_lengths=self.rollouts.counts_S[rejected_P],
            weights=self.rollouts.firsts(tokens.weights)[chosen_P].double(),
            reference_chosen_logprobs=None if reference_S is None else reference_S[chosen_P],
            reference_rejected_logprobs=None if reference_S is None else reference_S[rejected_P],
        )


def over_pairs(build: Callable[Arguments, Preference]) -> Callable[Arguments, Loss]:
    """The loss of a rule on pairs: same name, same arguments, same needs."""

    @functools.wraps(build)
    def built(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Loss:
        rule = build(*args, **kwargs)
        return loss_of(rule, "pairs", lambda tokens: _taught(rule, tokens, PairSides.of(tokens).pairs(tokens)))

    return built


def _taught(rule: Preference, tokens: Tokens, pairs: Pairs) -> Taught:
    loss, metrics = preference_loss(rule, pairs)
    return loss, metrics.merge(_entropy(tokens))


def _entropy(tokens: Tokens) -> MetricSums:
    return MetricSums() if tokens.entropy is None else mean_sums({"policy/entropy": tokens.entropy})


@loss_on("pairs", needs=("reference",))
def dpo_shift(
    beta: float = 0.1, factor: float = 0.95, until: float | None = None, steps: int = 0
) -> Callable[[Tokens], Taught]:
    """-logsig(beta (u_w - factor u_l)): less weight on the rejected side, against likelihood displacement.

    With `until` the factor goes linearly from `factor` to `until` over the first `steps` steps of the stage, e.g. from
    0.5 to 1. Yang et al. 2025 (arXiv 2502.07599); DPO-Shift.
    """
    last = factor if until is None else until
    for value in (factor, last):
        preferences.dpo_shift(beta, value)  # refuses what it cannot use now, not at the end of the run
    require(
        (until is None) == (steps == 0) and steps >= 0,
        f"dpo_shift: until={until} and steps={steps} belong together. Set both, e.g. until = 1.0 and steps = the "
        f"stage's, or neither",
    )

    def direct_loss(tokens: Tokens) -> Taught:
        share = shift_schedule(tokens.version / steps, factor, last) if steps else factor
        return _taught(preferences.dpo_shift(beta, share), tokens, PairSides.of(tokens).pairs(tokens))

    return direct_loss


@loss_on("pairs", needs=("reference",), opponent=1.0)
def xpo(beta: float = 0.1, alpha: float = 1e-5, loss: str = "dpo") -> Callable[[Tokens], Taught]:
    """DPO or IPO on (policy sample, reference sample) + alpha log pi(reference sample): optimism.

    Rows with a version are the policy's, rows with version -1 the reference's: a stage samples both, or the data says
    which is which. Xie et al. 2024 (arXiv 2405.21046); TRL.
    """
    rule = preferences.xpo(beta, alpha, loss)

    def direct_loss(tokens: Tokens) -> Taught:
        sides = PairSides.of(tokens)
        is_policy_S = sides.rollouts.firsts(tokens.versions) >= 0
        is_chosen_P = is_policy_S[sides.chosen_P]
        if bool((is_chosen_P == is_policy_S[sides.rejected_P]).any()):
            raise UserError(
                "xpo compares a completion of the policy with one of the reference, and a pair of this batch has both "
                'from one side. Give pairs with "is_chosen_from_policy", or prompts and a [[reward]]: both sides are '
                "then sampled"
            )
        return _taught(rule, tokens, replace(sides.pairs(tokens), is_chosen_from_policy=is_chosen_P))

    return direct_loss


@loss_on("pairs", needs=("reference", "batch"))
def beta_dpo(beta: float = 0.1, slope: float = 0.6, dropped: float = 0.2, decay: float = 0.9) -> BatchMeasure[Taught]:
    """-logsig(b delta) over the pairs kept: b = beta (1 + slope (mean kept delta - M)), at least 0.001.

    (1 - dropped) of the pairs of each batch are drawn with weights exp(-((delta - M) / S)^2 / 2); M and S are moving
    averages, which the controller margin_memory keeps. Wu et al. 2024 (arXiv 2407.08639); beta-DPO.
    """
    require(beta > 0, f"beta_dpo: beta={beta} must be positive, e.g. 0.1; a large beta stays close to the reference")
    require(0 <= dropped < 1, f"beta_dpo: dropped={dropped} must lie in [0, 1), e.g. 0.2")
    require(0 <= decay < 1, f"beta_dpo: decay={decay} must lie in [0, 1), e.g. 0.9")

    def measure(whole: Tokens, objective: Objective) -> Tensor:
        """[N, 4]: the pair's share in the loss, this batch's beta, M and S."""
        if all(controller.name != "margin_memory" for controller in objective.controllers):
            raise UserError(
                'beta_dpo compares margins with those of earlier batches. Add objective.controllers = ["margin_memory"]'
            )
        sides = PairSides.of(whole)
        pairs = sides.pairs(whole)
        assert pairs.reference_chosen_logprobs is not None, "beta_dpo needs the reference's log-probabilities"
        assert pairs.reference_rejected_logprobs is not None, "beta_dpo needs the reference's log-probabilities"
        chosen_P = pairs.chosen_logprobs - pairs.reference_chosen_logprobs
        margins_P = chosen_P - (pairs.rejected_logprobs - pairs.reference_rejected_logprobs)
        known = MEAN_KEY in whole.scales
        state = MarginState(mean=whole.scales[MEAN_KEY], std=whole.scales[STD_KEY]) if known else None
        choice = choose_pairs(margins_P, state, whole.seed, beta=beta, slope=slope, dropped=dropped, decay=decay)
        shares_P = choice.is_kept.double() / choice.is_kept.sum()
        rest_P = shares_P.new_tensor([choice.beta, choice.state.mean, choice.state.std]).expand(len(shares_P), 3)
        facts_S = torch.cat([shares_P[:, None], rest_P], 1).repeat_interleave(2, dim=0)
        return sides.rollouts.spread(facts_S.to(whole.policy_logprobs.device))

    def use(tokens: Tokens, facts_T: Tensor) -> Taught:
        sides = PairSides.of(tokens)
        facts_P = sides.rollouts.firsts(facts_T)[sides.chosen_P]
        batch_beta = float(facts_P[0, 1]) if len(facts_P) else beta
        shares_P = facts_P[:, 0]
        loss, metrics = _taught(preferences.dpo(batch_beta), tokens, replace(sides.pairs(tokens), weights=shares_P))
        # Equal for all pairs, and a maximum of equals is exact: the controller must not depend on the partition.
        batch = facts_P[:1, 1:].amax(0).unbind() if len(facts_P) else ()
        named = dict(zip(("preference/beta", AVERAGE, DEVIATION), batch, strict=False))
        return loss, metrics.merge(MetricSums(maxima=named)).merge(mean_sums({"preference/kept": shares_P > 0}))

    return BatchMeasure("beta_dpo", measure, use)


@factor()
def margin_memory() -> Callable[[State, State], State]:
    """Keeps the moving mean and deviation of margins that the loss beta_dpo goes by."""

    def follow(state: State, metrics: State) -> State:
        """Without a measurement, as before the first step, the state stays as it was."""
        found = {MEAN_KEY: metrics.get(AVERAGE, math.nan), STD_KEY: metrics.get(DEVIATION, math.nan)}
        if all(map(math.isfinite, found.values())):
            return found
        return {key: state[key] for key in found if key in state}

    return follow


@functools.wraps(unpaired.kto)
def kto(*args: float, **kwargs: float) -> Loss:
    """Rewards are labels, 1 or 0; advantages hold the baseline z, which is one number for the whole batch."""
    rule = unpaired.kto(*args, **kwargs)

    def direct_loss(tokens: Tokens) -> Taught:
        assert tokens.rewards is not None, "labels are rewards, and there are none"
        assert tokens.reference_logprobs is not None, "kto needs the reference's log-probabilities"
        rollouts = Rollouts.of(tokens)
        labelled = LabelledCompletions(
            logprobs=rollouts.sums(tokens.policy_logprobs),
            reference_logprobs=rollouts.sums(tokens.reference_logprobs),
            is_desirable=rollouts.firsts(tokens.rewards) > 0.5,
            weights=rollouts.firsts(tokens.weights).double(),
            baseline=float(tokens.advantages[0]) if len(tokens) else 0.0,
        )
        loss, metrics = labelled_loss(rule, labelled)
        return loss, metrics.merge(_entropy(tokens)).merge(mean_sums({"preference/baseline": tokens.advantages[:1]}))

    return loss_of(rule, "labelled", direct_loss)


@loss_on("wins", needs=("reference",), min_group=2, opponent="mixture")
def nash_md(beta: float = 0.1, mixture: float = 0.5) -> Callable[[Tokens], Taught]:
    """-(P(win) - 0.5) sum_t log pi_t + beta sum_t sg[log pi_t - log ref_t] log pi_t.

    P(win) is against opponents drawn from pi^(1 - mixture) ref^mixture, token by token: the share of those of its group
    that a completion beats, ties half. Munos et al. 2023 (arXiv 2312.00886); TRL.
    """
    require(beta >= 0, f"nash_md: beta={beta} must not be negative, e.g. 0.1")
    require(0 <= mixture <= 1, f"nash_md: mixture={mixture} must lie between 0 (the policy) and 1 (the reference)")

    def direct_loss(tokens: Tokens) -> Taught:
        assert tokens.reference_logprobs is not None, "nash_md needs the reference's log-probabilities"
        rollouts = Rollouts.of(tokens)
        policy_T, reference_T = tokens.over_vocabulary.double(), tokens.reference_logprobs.double()
        wins_S = rollouts.firsts(tokens.advantages).double()
        owners_T = rollouts.spread(torch.arange(len(wins_S), device=wins_S.device))
        losses_S = nash_md_losses(policy_T, reference_T, owners_T, wins_S, beta)
        loss = (losses_S * rollouts.firsts(tokens.weights)).sum()
        metrics = MetricSums(totals={"loss/preference": loss.detach()})
        watched = {"preference/log_ratio": rollouts.sums(policy_T.detach() - reference_T)}
        return loss, metrics.merge(mean_sums(watched)).merge(_entropy(tokens))

    return direct_loss


def implicit_rewards(direct_loss: Loss, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """What the loss compares, of the chosen and of the rejected sides [P]: held-out pairs are judged by it."""
    # Those below are DPO with pairs chosen, weighted or made in another way.
    is_plain = direct_loss.name in ("dpo_shift", "xpo", "beta_dpo", "kto", "nash_md")
    build = preferences.PREFERENCES["dpo" if is_plain else direct_loss.name]
    rule = build(beta=direct_loss.argument("beta")) if is_plain else build(**dict(direct_loss.arguments))
    with torch.no_grad():
        compared = rule(pairs)
    return compared.chosen_rewards, compared.rejected_rewards


PAIR_LOSSES: dict[str, Callable[..., Loss]] = {
    name: over_pairs(build) for name, build in preferences.PREFERENCES.items()
} | {"dpo_shift": dpo_shift, "xpo": xpo, "beta_dpo": beta_dpo, "kto": kto, "nash_md": nash_md}
PAIR_CONTROLLERS: dict[str, Callable[..., Controller]] = {"margin_memory": margin_memory}
