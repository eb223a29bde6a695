"""What is done about a sampler that is not quite the trainer: rho = pi_old / mu, from kernels or staleness.

Owns: detached multipliers and keep rules on the numerator. Refuses: denominators; a rejected token still counts there,
or rejection would silently raise the step size on the survivors (kept_denominator does so on request).
Shapes: _T drawn tokens of a microbatch, _N of the whole batch, _S trajectories.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from temper.objectives.factor import factor, require
from temper.objectives.objective import BatchMeasure, Correction, PolicyObjective, SamplerCorrection
from temper.objectives.tokens import Tokens, bounded

CorrectionFn = Callable[[Tokens], Correction]


@factor()
def token_importance() -> CorrectionFn:
    """rho_t itself, bounded only by exp(20): the token weight of decoupled PPO, where r clips and rho corrects.

    arXiv 2110.00641, 2505.24298; AReaL.
    """

    def correct(tokens: Tokens) -> Correction:
        return _rescaled(_log_rho(tokens).exp())

    return correct


@factor()
def token_tis(cap: float = 2.0, low: float = 0.0) -> CorrectionFn:
    """Truncated importance sampling: clip(rho_t, low, cap). Keeps every token. Yao et al. 2025."""
    _require_band("token_tis", low, cap)

    def correct(tokens: Tokens) -> Correction:
        rho_T = _log_rho(tokens).exp()
        return Correction(rho_T.clamp(low, cap), acted=_is_outside(rho_T, low, cap))

    return correct


@factor()
def token_mis(low: float = 0.5, high: float = 5.0) -> CorrectionFn:
    """Masked importance sampling (IcePop): rho_t inside [low, high], else 0."""
    _require_band("token_mis", low, high)

    def correct(tokens: Tokens) -> Correction:
        return _kept_inside(_log_rho(tokens).exp(), low, high)

    return correct


@factor()
def sequence_tis(cap: float = 2.0) -> CorrectionFn:
    """min(product of rho over the trajectory, cap), for all its tokens.

    Unbiased below the cap; explodes with length.
    """
    require(cap > 0, f"sequence_tis: cap={cap} must be positive, e.g. cap=2.0")

    def correct(tokens: Tokens) -> Correction:
        rho_T = _product(tokens).exp()
        return Correction(rho_T.clamp(max=cap), acted=rho_T > cap)

    return correct


@factor()
def sequence_mis(high: float = 3.0, low: float = 0.0) -> CorrectionFn:
    """Product of rho over the trajectory when inside [low, high], else 0. Liu, Li et al. 2025."""
    _require_band("sequence_mis", low, high)

    def correct(tokens: Tokens) -> Correction:
        return _kept_inside(_product(tokens).exp(), low, high)

    return correct


@factor()
def geometric_keep(low: float = 0.999, high: float = 1.001) -> CorrectionFn:
    """Keeps a trajectory when the geometric mean of its rho is inside [low, high]; weight 1.

    A length-free filter, not an unbiased weight. Bounds are on rho = pi_old / mu, not on its reciprocal.
    """
    _require_band("geometric_keep", low, high)

    def correct(tokens: Tokens) -> Correction:
        mean_S = tokens.mean_by_trajectory(_unbounded_log_rho(tokens))
        return _keep(~_is_outside(bounded(mean_S).exp(), low, high)[tokens.trajectory_ids], tokens)

    return correct


@factor()
def veto(threshold: float = 1e-4) -> CorrectionFn:
    """Drops a trajectory when any of its tokens has rho below `threshold`: the trainer finds it all but impossible."""
    require(0 < threshold < 1, f"veto: threshold={threshold} must lie between 0 and 1, e.g. 1e-4")

    def correct(tokens: Tokens) -> Correction:
        is_outlier_T = (_log_rho(tokens).exp() < threshold).to(tokens.weights.dtype)
        return _keep((tokens.sum_by_trajectory(is_outlier_T) == 0)[tokens.trajectory_ids], tokens)

    return correct


@factor()
def kl_keep(high: float, estimator: str = "k3", level: str = "sum") -> CorrectionFn:
    """Keeps what is close to the sampler: an estimate of KL(mu || pi_old) of at most `high`; weight 1.

    k2 = (log rho)^2 / 2, k3 = rho - 1 - log rho, both at least 0. level = "token" judges each token alone; "sum",
    "mean" and "max" judge a trajectory by that of its tokens. verl.
    """
    require(high > 0, f"kl_keep: high={high} must be positive, e.g. 0.01")
    require(estimator in ("k2", "k3"), f'kl_keep: estimator="{estimator}" is unknown. Use "k2" or "k3".')
    levels = ("token", "sum", "mean", "max")
    require(level in levels, f'kl_keep: level="{level}" is unknown. Use one of {", ".join(levels)}.')

    def correct(tokens: Tokens) -> Correction:
        log_rho_T = _log_rho(tokens)
        kl_T = log_rho_T.square() / 2 if estimator == "k2" else log_rho_T.exp() - 1 - log_rho_T
        if level == "token":
            return _keep(kl_T <= high, tokens)
        by_level = {"sum": tokens.sum_by_trajectory, "mean": tokens.mean_by_trajectory, "max": tokens.max_by_trajectory}
        return _keep((by_level[level](kl_T) <= high)[tokens.trajectory_ids], tokens)

    return correct


@factor(experimental="the threshold of DeepSeek-V3.2 is not public; 0.5 is the one TRL suggests")
def opsm(threshold: float = 0.5) -> CorrectionFn:
    """Off-policy sequence masking: drops a trajectory iff its advantage is negative and mean_t(log mu - log pi) exceeds
    `threshold`: pushing down what the policy has already left teaches nothing and destabilises.

    The base is mu and the policy is the current one, detached. Advantages that differ inside a trajectory are averaged.
    DeepSeek-V3.2; TRL, slime.
    """

    def correct(tokens: Tokens) -> Correction:
        gap_S = tokens.mean_by_trajectory(tokens.behavior_logprobs - tokens.policy_logprobs.detach())
        is_bad_S = tokens.mean_by_trajectory(tokens.advantages) < 0
        return _keep(~(is_bad_S & (gap_S > threshold))[tokens.trajectory_ids], tokens)

    return correct


@factor(needs=("batch",))
def m2po(threshold: float) -> CorrectionFn:
    """Drops the tokens with the largest (log mu - log pi_old)^2 until the mean over the rest is below `threshold`.

    Bounds the second moment of the mismatch over the whole batch; of equal tokens the later ones go first.
    M2PO, arXiv 2510.01161; AReaL.
    """
    require(threshold > 0, f"m2po: threshold={threshold} must be positive, e.g. 0.04")

    def measure(whole: Tokens, objective: PolicyObjective) -> Tensor:
        square_N = _unbounded_log_rho(whole).double().square()
        ascending_N, order_N = square_N.sort(stable=True)
        # On the CPU: running sums of a GPU are added in no fixed order.
        means_N = ascending_N.cpu().cumsum(0) / torch.arange(1, len(square_N) + 1)
        # Means of ever larger tokens never fall, but their rounding may.
        num_kept = int((means_N < threshold).long().cumprod(0).sum())
        is_kept_N = torch.zeros_like(whole.weights)
        is_kept_N[order_N[:num_kept]] = 1.0
        return is_kept_N

    return BatchMeasure("m2po", measure, kept_as_measured)


@factor(needs=("batch",))
def batch_normalize(level: str = "token") -> CorrectionFn:
    """1 / mean(W), W the product of the objective's other corrections: the correction then changes who counts, not how
    much all count together.

    The mean is over all tokens of the whole batch, or over trajectories (level = "sequence", for weights that are the
    same for a whole trajectory). What a keep rule dropped has W = 0. verl, slime.
    """
    require(level in ("token", "sequence"), f'batch_normalize: level="{level}" is unknown. Use "token" or "sequence".')

    def measure(whole: Tokens, objective: PolicyObjective) -> Tensor:
        multiplier_N = _other_multipliers(whole, objective)
        if level == "token":
            return _everywhere(whole, multiplier_N.new_tensor(len(multiplier_N)), multiplier_N.sum())
        num_present = (whole.sum_by_trajectory(torch.ones_like(multiplier_N)) > 0).double().sum()
        return _everywhere(whole, num_present, whole.mean_by_trajectory(multiplier_N).sum())

    return BatchMeasure("batch_normalize", measure, _rescaled_as_measured)


@factor(needs=("batch",))
def kept_denominator() -> CorrectionFn:
    """sum(weights) / sum(weights of kept tokens): takes what other corrections dropped out of the denominator as well.

    Exactly the mean over kept tokens under token_mean; under other weightings one factor for the whole batch. The step
    then grows with the share that was dropped, which is why it is not the default. verl.
    """

    def measure(whole: Tokens, objective: PolicyObjective) -> Tensor:
        require(
            all(correct.name != "batch_normalize" for correct in objective.corrections),
            "kept_denominator and batch_normalize both make up for dropped tokens, twice together. Use one of them.",
        )
        weights_N = whole.weights.double()
        is_kept_N = _other_multipliers(whole, objective) != 0
        return _everywhere(whole, weights_N.sum(), (weights_N * is_kept_N).sum())

    return BatchMeasure("kept_denominator", measure, _rescaled_as_measured)


def kept_as_measured(tokens: Tokens, is_kept_T: Tensor) -> Correction:
    """A keep rule that was decided on the whole batch: 1 keeps, 0 drops."""
    return Correction(is_kept_T, acted=is_kept_T == 0)


def _rescaled_as_measured(tokens: Tokens, factor_T: Tensor) -> Correction:
    return _rescaled(factor_T)


def _rescaled(multiplier_T: Tensor) -> Correction:
    return Correction(multiplier_T, acted=torch.zeros_like(multiplier_T, dtype=torch.bool))


def _everywhere(whole: Tokens, numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient for every token; 1 where everything was dropped and there is nothing to rescale."""
    quotient = torch.where(denominator > 0, numerator / denominator, 1.0)
    return torch.ones_like(whole.weights) * quotient.to(whole.weights.dtype)


def _other_multipliers(whole: Tokens, objective: PolicyObjective) -> Tensor:
    """Product of all corrections but the two that rescale it. Those that are measured themselves are measured here, so
    that their place in the list does not matter."""
    product_N = torch.ones_like(whole.weights, dtype=torch.float64)
    for correct in objective.corrections:
        if correct.name in ("batch_normalize", "kept_denominator"):
            continue
        rule = correct.run
        own = rule.use(whole, rule.measure(whole, objective)) if isinstance(rule, BatchMeasure) else correct(whole)
        product_N = product_N * own.multiplier
    return product_N


def _unbounded_log_rho(tokens: Tokens) -> Tensor:
    return tokens.proximal_logprobs - tokens.behavior_logprobs


def _log_rho(tokens: Tokens) -> Tensor:
    return bounded(_unbounded_log_rho(tokens))


def _product(tokens: Tokens) -> Tensor:
    """Log of the product over each token's trajectory."""
    return bounded(tokens.sum_by_trajectory(_unbounded_log_rho(tokens)))[tokens.trajectory_ids]


def _is_outside(rho: Tensor, low: float, high: float) -> Tensor:
    return (rho < low) | (rho > high)


def _kept_inside(rho_T: Tensor, low: float, high: float) -> Correction:
    is_outside_T = _is_outside(rho_T, low, high)
    return Correction(rho_T.masked_fill(is_outside_T, 0.0), acted=is_outside_T)


def _keep(is_kept_T: Tensor, tokens: Tokens) -> Correction:
    return Correction(is_kept_T.to(tokens.weights.dtype), acted=~is_kept_T)


def _require_band(name: str, low: float, high: float) -> None:
    require(0 <= low < high, f"{name}: the band from {low} to {high} must be ordered and not negative, e.g. 0.5 to 2.0")


CORRECTIONS: dict[str, Callable[..., SamplerCorrection]] = {
    "token_importance": token_importance,
    "token_tis": token_tis,
    "token_mis": token_mis,
    "sequence_tis": sequence_tis,
    "sequence_mis": sequence_mis,
    "geometric_keep": geometric_keep,
    "kl_keep": kl_keep,
    "veto": veto,
    "opsm": opsm,
    "m2po": m2po,
    "batch_normalize": batch_normalize,
    "kept_denominator": kept_denominator,
}
