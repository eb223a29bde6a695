"""Direct alignment: losses on pairs of completions of which one was preferred, without a reward model.

Owns: one loss per pair, how losses add up, what is watched meanwhile. Refuses: completions without an opposite
(unpaired.py), choosing among pairs (beta_dpo.py), log-probabilities (sums over response tokens are given) and
denominators: `weights` hold one over the batch's, so losses of microbatches simply add.
Shapes: _P pairs of one microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from temper.objectives.factor import Factor, factor, require
from temper.objectives.metrics import MetricSums, mean_sums
from temper.types import require_parallel

MOMENTS = (
    "preference/reward_mean", "preference/reward_square_mean", "preference/length_mean",
    "preference/length_square_mean", "preference/reward_length_mean",
)  # fmt: skip
"""Steps on the way to preference/reward_length_correlation, not worth a chart of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Two completions of one prompt each, all columns [P]. Log-probabilities are sums over response tokens."""

    chosen_logprobs: Tensor
    """By the policy, with gradient."""
    rejected_logprobs: Tensor
    """By the policy, with gradient."""
    chosen_lengths: Tensor
    """Response tokens, end token included."""
    rejected_lengths: Tensor
    weights: Tensor
    """Share of each pair in the loss of the whole batch, e.g. one over its number of pairs.
    0 leaves a pair out of the loss, not of the metrics."""
    reference_chosen_logprobs: Tensor | None = None
    """None: the rule at hand reads no reference."""
    reference_rejected_logprobs: Tensor | None = None
    is_chosen_from_policy: Tensor | None = None
    """True where the policy sampled the chosen completion and the reference the rejected one; False the other way
    round. None: they come from elsewhere (only xpo reads it)."""

    def __post_init__(self) -> None:
        optional = ("reference_chosen_logprobs", "reference_rejected_logprobs", "is_chosen_from_policy")
        constants = ["chosen_lengths", "rejected_lengths", "weights"]
        constants += [name for name in optional if getattr(self, name) is not None]
        require_parallel(self, "chosen_logprobs", "rejected_logprobs", *constants)
        for name in constants:
            assert not getattr(self, name).requires_grad, f"{name} must not carry a gradient"


@dataclass(frozen=True, slots=True)
class PairLosses:
    """What a rule returns, all [P]. Rewards are the ones the rule compares, for monitoring; detached."""

    losses: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


PairRule = Callable[[Pairs], PairLosses]
Preference = Factor[[Pairs], PairLosses]


@factor(needs=("reference",))
def dpo(beta: float = 0.1) -> PairRule:
    """-logsig(beta delta), delta = u_w - u_l, u = log pi - log ref of a completion.

    beta is the KL weight of the underlying problem, whose optimum is ref * exp(R / beta): a LARGE beta stays close to
    the reference, a small one allows larger drift. Rafailov et al. 2023 (arXiv 2305.18290); TRL.
    """
    _require_beta("dpo", beta)
    return lambda pairs: _compared(beta, *_log_ratios(pairs), lambda margin_P: -logsigmoid(margin_P))


@factor(needs=("reference",))
def cdpo(beta: float = 0.1, noise: float = 0.1) -> PairRule:
    """-(1 - noise) logsig(beta delta) - noise logsig(-beta delta): DPO when that share of the labels is flipped.

    Keeps the margin finite. Mitchell 2023; OpenRLHF.
    """
    _require_beta("cdpo", beta)
    _require_noise("cdpo", noise)

    def losses(margin_P: Tensor) -> Tensor:
        return -(1 - noise) * logsigmoid(margin_P) - noise * logsigmoid(-margin_P)

    return lambda pairs: _compared(beta, *_log_ratios(pairs), losses)


@factor(needs=("reference",))
def robust(beta: float = 0.1, noise: float = 0.1) -> PairRule:
    """[-(1 - noise) logsig(beta delta) + noise logsig(-beta delta)] / (1 - 2 noise): unbiased under flipped labels.

    May be negative. Chowdhury et al. 2024 (arXiv 2403.00409); TRL (robust).
    """
    _require_beta("robust", beta)
    _require_noise("robust", noise)

    def losses(margin_P: Tensor) -> Tensor:
        return (-(1 - noise) * logsigmoid(margin_P) + noise * logsigmoid(-margin_P)) / (1 - 2 * noise)

    return lambda pairs: _compared(beta, *_log_ratios(pairs), losses)


@factor(needs=("reference",))
def ipo(beta: float = 0.1, average: int = 1) -> PairRule:
    """(u_w / T_w - u_l / T_l - 1 / (2 beta))^2: a target margin instead of an ever larger one.

    Averaged over tokens, as its authors meant it; average = 0 takes sums. Azar et al. 2023 (arXiv 2310.12036); TRL.
    """
    _require_beta("ipo", beta)
    require(average in (0, 1), f"ipo: average={average} must be 1 (per token) or 0 (sums)")
    log_ratios = _mean_log_ratios if average else _log_ratios
    # The target 1 / (2 beta) is on the log-ratios; they are compared as rewards, i.e. times beta.
    return lambda pairs: _compared(beta, *log_ratios(pairs), lambda margin_P: (margin_P - 0.5).square() / beta**2)


@factor(needs=("reference",))
def hinge(beta: float = 0.1) -> PairRule:
    """max(0, 1 - beta delta): no gradient once a pair is separated. SLiC, arXiv 2305.10425; TRL."""
    _require_beta("hinge", beta)
    return lambda pairs: _compared(beta, *_log_ratios(pairs), lambda margin_P: (1 - margin_P).clamp(min=0))


@factor(needs=("reference",))
def length_normalized(beta: float = 0.1) -> PairRule:
    """-logsig(beta (u_w / T_w - u_l / T_l)): DPO that gains nothing by length.

    TRL (sigmoid_norm).
    """
    _require_beta("length_normalized", beta)
    return lambda pairs: _compared(beta, *_mean_log_ratios(pairs), lambda margin_P: -logsigmoid(margin_P))


@factor(needs=("reference",))
def rpo(beta: float = 0.1, alpha: float = 1.0) -> PairRule:
    """DPO + alpha (-log pi(y_w)) / T_w: the chosen completion is kept likely. alpha 1 (iterative RPO) or 0.005 (RPO).

    Pang et al. 2024 (arXiv 2404.19733); TRL (sigmoid + sft).
    """
    _require_alpha("rpo", alpha)
    return _with_likelihood(dpo(beta), alpha)


@factor(needs=("reference",))
def dpo_shift(beta: float = 0.1, factor: float = 0.95) -> PairRule:
    """-logsig(beta (u_w - factor u_l)): less weight on the rejected side, against likelihood displacement.

    `factor` may also follow shift_schedule. Yang et al. 2025 (arXiv 2502.07599); DPO-Shift.
    """
    _require_beta("dpo_shift", beta)
    require(0 < factor <= 1, f"dpo_shift: factor={factor} must lie in (0, 1], e.g. 0.95")

    def rule(pairs: Pairs) -> PairLosses:
        chosen_P, rejected_P = _log_ratios(pairs)
        return _compared(beta, chosen_P, factor * rejected_P, lambda margin_P: -logsigmoid(margin_P))

    return rule


def shift_schedule(progress: float, start: float = 0.5, end: float = 1.0) -> float:
    """The factor of dpo_shift after this share of the run: linear from start to end, either way."""
    return start + (end - start) * min(max(progress, 0.0), 1.0)


@factor()
def simpo(beta: float = 2.0, margin: float = 1.0) -> PairRule:
    """-logsig(beta (log pi(y_w) / T_w - log pi(y_l) / T_l) - margin): mean log-probability as the reward, no reference.

    Meng et al. 2024 (arXiv 2405.14734); TRL (cpo, simpo; its margin is 0.5).
    """
    _require_beta("simpo", beta)
    return lambda pairs: _compared(beta, *_mean_logprobs(pairs), lambda margin_P: -logsigmoid(margin_P - margin))


@factor()
def cpo(beta: float = 0.1, alpha: float = 1.0) -> PairRule:
    """-logsig(beta (log pi(y_w) - log pi(y_l))) + alpha (-log pi(y_w)) / T_w: DPO with a uniform reference.

    Xu et al. 2024 (arXiv 2401.08417); TRL (cpo).
    """
    _require_beta("cpo", beta)
    _require_alpha("cpo", alpha)

    def compare(pairs: Pairs) -> PairLosses:
        return _compared(beta, pairs.chosen_logprobs, pairs.rejected_logprobs, lambda margin_P: -logsigmoid(margin_P))

    return _with_likelihood(compare, alpha)


@factor(experimental="read in its paper, not in code: both constants are ours, and labels do not move (POWER-DL)")
def power(beta: float = 2.0, eta: float = 0.01) -> PairRule:
    """-logsig(r_w - r_l) + eta beta (-log pi(y_w)) / T_w, r = beta (log pi(y) + 1) / T: no reference.

    r is the reward under which pi is best when an entropy weighted by 1 / T is added: it maximises
    E[r] - beta E[log pi / T]. eta: how much a reward is held to be too high wherever the data says little, so that
    chosen answers stay likely. Rashidinejad and Tian 2024 (arXiv 2412.09544).
    """
    _require_beta("power", beta)
    require(eta >= 0, f"power: eta={eta} must not be negative, e.g. 0.01")

    def compare(pairs: Pairs) -> PairLosses:
        chosen_P, rejected_P = _mean_logprobs(pairs)
        chosen_P, rejected_P = chosen_P + 1 / pairs.chosen_lengths, rejected_P + 1 / pairs.rejected_lengths
        return _compared(beta, chosen_P, rejected_P, lambda margin_P: -logsigmoid(margin_P))

    return _with_likelihood(compare, eta * beta)


@factor()
def orpo(weight: float = 0.1) -> PairRule:
    """NLL_w - weight logsig(log odds_w - log odds_l), odds = P / (1 - P), P = exp(mean token log-probability).

    Supervised learning and preference in one, no reference. Hong et al. 2024 (arXiv 2403.07691); TRL.
    """
    require(weight >= 0, f"orpo: weight={weight} must not be negative, e.g. 0.1")

    def rule(pairs: Pairs) -> PairLosses:
        chosen_P, rejected_P = _mean_logprobs(pairs)
        preference_P = logsigmoid(_log_odds(chosen_P) - _log_odds(rejected_P))
        return PairLosses(-chosen_P - weight * preference_P, weight * chosen_P.detach(), weight * rejected_P.detach())

    return rule


@factor(needs=("reference",))
def xpo(beta: float = 0.1, alpha: float = 1e-5, loss: str = "dpo") -> PairRule:
    """DPO or IPO on (policy sample, reference sample) + alpha log pi(reference sample): optimism.

    The added term lowers the likelihood of what the reference says already. Xie et al. 2024 (arXiv 2405.21046); TRL.
    """
    _require_alpha("xpo", alpha)
    require(loss in ("dpo", "ipo"), f'xpo: loss="{loss}" is unknown. Use "dpo" or "ipo".')
    compare = dpo(beta) if loss == "dpo" else ipo(beta, average=0)

    def rule(pairs: Pairs) -> PairLosses:
        assert pairs.is_chosen_from_policy is not None, "xpo needs to know which completion the reference sampled"
        compared = compare(pairs)
        known_P = torch.where(pairs.is_chosen_from_policy, pairs.rejected_logprobs, pairs.chosen_logprobs)
        return PairLosses(compared.losses + alpha * known_P, compared.chosen_rewards, compared.rejected_rewards)

    return rule


def preference_loss(rule: Preference, pairs: Pairs) -> tuple[Tensor, MetricSums]:
    """This microbatch's part of the loss, and sums for its metrics; parts of all microbatches and ranks add up."""
    compared = rule(pairs)
    loss = (compared.losses * pairs.weights).sum()
    with torch.no_grad():
        chosen_P, rejected_P = compared.chosen_rewards, compared.rejected_rewards
        means = {
            "preference/chosen_reward": chosen_P,
            "preference/rejected_reward": rejected_P,
            "preference/margin": chosen_P - rejected_P,
            "preference/accuracy": chosen_P > rejected_P,
            "preference/chosen_logprob": pairs.chosen_logprobs,
            "preference/rejected_logprob": pairs.rejected_logprobs,
            "preference/length_difference": pairs.chosen_lengths - pairs.rejected_lengths,
        }
        if pairs.reference_chosen_logprobs is not None:
            # Estimates KL(pi || ref) only where the policy sampled the completions itself.
            chosen_ratio_P, rejected_ratio_P = _log_ratios(pairs)
            means["preference/log_ratio"] = (chosen_ratio_P + rejected_ratio_P) / 2
        total = MetricSums(totals={"loss/preference": loss.detach().double()})
        return loss, total.merge(mean_sums(means)).merge(_length_moments(pairs, chosen_P, rejected_P))


def reward_length_correlation(metrics: Mapping[str, float]) -> float:
    """Correlation of implicit reward and length over all completions, from finished metrics; 0 when either is constant.

    Near 1: the policy learns that longer is better, and accuracy says little.
    """
    reward, length = metrics["preference/reward_mean"], metrics["preference/length_mean"]
    reward_variance = metrics["preference/reward_square_mean"] - reward**2
    length_variance = metrics["preference/length_square_mean"] - length**2
    if min(reward_variance, length_variance) <= 1e-12:
        return 0.0
    covariance = metrics["preference/reward_length_mean"] - reward * length
    return float(covariance / (reward_variance * length_variance) ** 0.5)


def correlated(finished: Mapping[str, float]) -> dict[str, float]:
    """Finished metrics with preference/reward_length_correlation in place of the five moments it is made of.

    Not a mean, so it can only be formed once microbatches and ranks have been added up.
    """
    if not all(name in finished for name in MOMENTS):
        return dict(finished)
    others = {name: value for name, value in finished.items() if name not in MOMENTS}
    return others | {"preference/reward_length_correlation": reward_length_correlation(finished)}


def _compared(beta: float, chosen_P: Tensor, rejected_P: Tensor, losses: Callable[[Tensor], Tensor]) -> PairLosses:
    """Losses of the margin between two rewards, each beta times what is compared."""
    chosen_P, rejected_P = beta * chosen_P, beta * rejected_P
    return PairLosses(losses(chosen_P - rejected_P), chosen_P.detach(), rejected_P.detach())


def _with_likelihood(rule: PairRule, alpha: float) -> PairRule:
    """Adds alpha times the chosen completion's mean negative log-likelihood per token."""

    def joined(pairs: Pairs) -> PairLosses:
        compared = rule(pairs)
        likelihood_P = _mean_logprobs(pairs)[0]
        return PairLosses(compared.losses - alpha * likelihood_P, compared.chosen_rewards, compared.rejected_rewards)

    return joined


def _log_ratios(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """u of the chosen and of the rejected completions."""
    chosen_P, rejected_P = pairs.reference_chosen_logprobs, pairs.reference_rejected_logprobs
    assert chosen_P is not None, "the rule needs the reference's log-probabilities of the chosen completions"
    assert rejected_P is not None, "the rule needs the reference's log-probabilities of the rejected completions"
    return pairs.chosen_logprobs - chosen_P, pairs.rejected_logprobs - rejected_P


def _mean_log_ratios(pairs: Pairs) -> tuple[Tensor, Tensor]:
    chosen_P, rejected_P = _log_ratios(pairs)
    return chosen_P / pairs.chosen_lengths, rejected_P / pairs.rejected_lengths


def _mean_logprobs(pairs: Pairs) -> tuple[Tensor, Tensor]:
    return pairs.chosen_logprobs / pairs.chosen_lengths, pairs.rejected_logprobs / pairs.rejected_lengths


def _log_odds(logprobs_P: Tensor) -> Tensor:
    # The odds of a certain completion are infinite, with a NaN for a gradient.
    logprobs_P = logprobs_P.clamp(max=-torch.finfo(logprobs_P.dtype).eps)
    return logprobs_P - torch.log(-torch.expm1(logprobs_P))


def _length_moments(pairs: Pairs, chosen_P: Tensor, rejected_P: Tensor) -> MetricSums:
    """What reward_length_correlation is made of; moments merge over microbatches, correlations do not."""
    rewards_2P = torch.cat([chosen_P, rejected_P]).double()
    lengths_2P = torch.cat([pairs.chosen_lengths, pairs.rejected_lengths]).double()
    return mean_sums(
        {
            "preference/reward_mean": rewards_2P,
            "preference/reward_square_mean": rewards_2P.square(),
            "preference/length_mean": lengths_2P,
            "preference/length_square_mean": lengths_2P.square(),
            "preference/reward_length_mean": rewards_2P * lengths_2P,
        }
    )


def _require_beta(name: str, beta: float) -> None:
    require(beta > 0, f"{name}: beta={beta} must be positive, e.g. 0.1; a large beta stays close to the reference")


def _require_noise(name: str, noise: float) -> None:
    require(0 <= noise < 0.5, f"{name}: noise={noise} must lie in [0, 0.5): the share of flipped labels, e.g. 0.1")


def _require_alpha(name: str, alpha: float) -> None:
    require(alpha >= 0, f"{name}: alpha={alpha} must not be negative, e.g. 1.0")


_ALL = (dpo, cdpo, robust, ipo, hinge, length_normalized, rpo, dpo_shift, simpo, cpo, power, orpo, xpo)
PREFERENCES: dict[str, Callable[..., Preference]] = {build.__name__: build for build in _ALL}
