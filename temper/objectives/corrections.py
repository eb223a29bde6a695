"""What is done about a sampler that is not quite the trainer: rho = pi_old / mu, from kernels or staleness.

Owns: detached multipliers and keep rules on the numerator. Refuses: denominators; a rejected token still counts there,
or rejection would silently raise the step size on the survivors.
Shapes: _T drawn tokens, _S trajectories.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from temper.objectives.factor import factor, require
from temper.objectives.objective import Correction, SamplerCorrection, Tokens, bounded

CorrectionFn = Callable[[Tokens], Correction]


@factor()
def token_tis(cap: float = 2.0, low: float = 0.0) -> CorrectionFn:
    """Truncated importance sampling: clip(rho_t, low, cap). Keeps every token. Yao et al. 2025. Specification 1.6."""
    _require_band("token_tis", low, cap)

    def correct(tokens: Tokens) -> Correction:
        rho_T = _log_rho(tokens).exp()
        return Correction(rho_T.clamp(low, cap), acted=_is_outside(rho_T, low, cap))

    return correct


@factor()
def token_mis(low: float = 0.5, high: float = 5.0) -> CorrectionFn:
    """Masked importance sampling (IcePop): rho_t inside [low, high], else 0. Specification 1.6."""
    _require_band("token_mis", low, high)

    def correct(tokens: Tokens) -> Correction:
        return _kept_inside(_log_rho(tokens).exp(), low, high)

    return correct


@factor()
def sequence_tis(cap: float = 2.0) -> CorrectionFn:
    """min(product of rho over the trajectory, cap), for all its tokens. Unbiased below the cap; explodes with length.

    Specification 1.6.
    """
    require(cap > 0, f"sequence_tis: cap={cap} must be positive, e.g. cap=2.0")

    def correct(tokens: Tokens) -> Correction:
        rho_T = _product(tokens).exp()
        return Correction(rho_T.clamp(max=cap), acted=rho_T > cap)

    return correct


@factor()
def sequence_mis(high: float = 3.0, low: float = 0.0) -> CorrectionFn:
    """Product of rho over the trajectory when inside [low, high], else 0. Liu, Li et al. 2025. Specification 1.6."""
    _require_band("sequence_mis", low, high)

    def correct(tokens: Tokens) -> Correction:
        return _kept_inside(_product(tokens).exp(), low, high)

    return correct


@factor()
def geometric_keep(low: float = 0.999, high: float = 1.001) -> CorrectionFn:
    """Keeps a trajectory when the geometric mean of its rho is inside [low, high]; weight 1.

    A length-free filter, not an unbiased weight. Bounds are on rho = pi_old / mu, not on its reciprocal.
    Specification 1.6.
    """
    _require_band("geometric_keep", low, high)

    def correct(tokens: Tokens) -> Correction:
        mean_S = tokens.mean_by_trajectory(_unbounded_log_rho(tokens))
        return _keep(~_is_outside(bounded(mean_S).exp(), low, high)[tokens.trajectory_ids], tokens)

    return correct


@factor()
def veto(threshold: float = 1e-4) -> CorrectionFn:
    """Drops a trajectory when any of its tokens has rho below `threshold`: the trainer finds it all but impossible.

    Specification 1.6.
    """
    require(0 < threshold < 1, f"veto: threshold={threshold} must lie between 0 and 1, e.g. 1e-4")

    def correct(tokens: Tokens) -> Correction:
        is_outlier_T = (_log_rho(tokens).exp() < threshold).to(tokens.weights.dtype)
        return _keep((tokens.sum_by_trajectory(is_outlier_T) == 0)[tokens.trajectory_ids], tokens)

    return correct


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
    "token_tis": token_tis,
    "token_mis": token_mis,
    "sequence_tis": sequence_tis,
    "sequence_mis": sequence_mis,
    "geometric_keep": geometric_keep,
    "veto": veto,
}
