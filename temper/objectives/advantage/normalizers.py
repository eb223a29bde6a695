"""What is done to advantages once they are known: scaling over the batch, limits, filtering, noise, a teacher.

Owns: statistics over all tokens of the batch. Refuses: groups and baselines (advantages.py), weights (weighting.py).
Shapes: _B scored trajectories of the batch, _N their drawn tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from temper.objectives.advantage.credit import Advantages, Credit
from temper.objectives.advantage.token_advantages import require_share, teacher_advantages
from temper.objectives.factor import factor, require
from temper.objectives.objective import Normalizer

NormalizerFn = Callable[[Credit, Advantages], Advantages]
VARIANCE_FLOOR = 1e-8
NORMAL_QUARTILES = 1.349
"""Between the quartiles of a normal distribution, in deviations."""


@factor()
def whiten(variance: str = "biased") -> NormalizerFn:
    """(A - mean(A)) / sqrt(max(var(A), 1e-8)) over all drawn tokens of the batch that are kept.

    Token-weighted: long answers count more. "biased" divides by N (OpenRLHF, NeMo-RL), "unbiased" by N - 1 (verl).
    For REINFORCE++, PPO, GDPO.
    """
    require(
        variance in ("biased", "unbiased"), f'whiten: variance="{variance}" is unknown. Use "biased" or "unbiased".'
    )

    def normalized(credit: Credit, advantages: Advantages) -> Advantages:
        is_kept_N = credit.spread(advantages.is_kept)
        count = is_kept_N.sum()
        mean = torch.where(is_kept_N, advantages.tokens, 0.0).sum() / count.clamp(min=1)
        centred_N = advantages.tokens - mean
        squares = torch.where(is_kept_N, centred_N, 0.0).square().sum()
        spread = squares / (count if variance == "biased" else count - 1).clamp(min=1)
        return replace(advantages, tokens=centred_N / spread.clamp(min=VARIANCE_FLOOR).sqrt())

    return normalized


@factor()
def percentile(low: float = 0.05, high: float = 0.95, floor: float = 1.0) -> NormalizerFn:
    """A / max(floor, P_high(A) - P_low(A)), percentiles over all drawn tokens of the batch that are kept.

    Scales only: no sign changes and 0 stays 0. A few wild advantages do not shrink all others, and with floor = 1 small
    ones are not blown up. DreamerV3, arXiv 2301.04104, which scales returns so and averages the range over steps.
    """
    require(0 <= low < high <= 1, f"percentile: low={low} and high={high} need 0 <= low < high <= 1, e.g. 0.05, 0.95")
    require(floor > 0, f"percentile: floor={floor} must be positive, e.g. 1.0")

    def normalized(credit: Credit, advantages: Advantages) -> Advantages:
        scale = max(floor, _range(credit, advantages, low, high))
        return replace(advantages, tokens=advantages.tokens / scale)

    return normalized


@factor(experimental="no primary source for language models; DreamerV3 scales by wider percentiles")
def interquartile(floor: float = 0.1) -> NormalizerFn:
    """A / max(floor, (P_75(A) - P_25(A)) / 1.349) over all drawn tokens of the batch that are kept.

    1.349 makes it a deviation where advantages are normal. Scales only: no sign changes and 0 stays 0. Where more than
    half of the tokens have one advantage the quartiles coincide and the floor decides.
    """
    require(floor > 0, f"interquartile: floor={floor} must be positive, e.g. 0.1")

    def normalized(credit: Credit, advantages: Advantages) -> Advantages:
        scale = max(floor, _range(credit, advantages, 0.25, 0.75) / NORMAL_QUARTILES)
        return replace(advantages, tokens=advantages.tokens / scale)

    return normalized


def _range(credit: Credit, advantages: Advantages, low: float, high: float) -> float:
    """Between two percentiles of the kept tokens, each the value at rank ceil(n * share); 0 where nothing is kept."""
    ordered_N = advantages.tokens[credit.spread(advantages.is_kept)].sort().values
    if not len(ordered_N):
        return 0.0
    places = [max(0, math.ceil(len(ordered_N) * share - 1e-9) - 1) for share in (low, high)]
    return float(ordered_N[places[1]] - ordered_N[places[0]])


@factor()
def clip_advantages(limit: float) -> NormalizerFn:
    """clip(A, -limit, limit): no single token dominates a step."""
    require(limit > 0, f"clip_advantages: limit={limit} must be positive, e.g. 5.0")
    return lambda credit, advantages: replace(advantages, tokens=advantages.tokens.clamp(-limit, limit))


@factor(experimental="no primary source; the learning rate has to be found anew for the smaller batch")
def drop_small(threshold: float) -> NormalizerFn:
    """Removes trajectories whose largest |A_t| is below the threshold; they count in no denominator either.

    Any small threshold above 0 removes exactly those without advantage; 0 removes nothing.
    """
    require(threshold >= 0, f"drop_small: threshold={threshold} must not be negative, e.g. 1e-6")

    def normalized(credit: Credit, advantages: Advantages) -> Advantages:
        nothing_B = advantages.tokens.new_zeros(len(credit.lengths))
        largest_B = nothing_B.scatter_reduce(0, credit.owners, advantages.tokens.abs(), "amax")
        return replace(advantages, is_kept=advantages.is_kept & (largest_B >= threshold))

    return normalized


@factor(experimental="no primary source was found")
def gaussian_noise(sigma: float) -> NormalizerFn:
    """A_i + sigma * xi_i, xi ~ N(0, 1), one draw per trajectory, the same whatever else is in the batch.

    sigma of 0.05 to 0.1 is suggested for standardised advantages.
    """
    require(sigma >= 0, f"gaussian_noise: sigma={sigma} must not be negative, e.g. 0.05")

    def normalized(credit: Credit, advantages: Advantages) -> Advantages:
        assert credit.member_keys is not None, "gaussian_noise draws by the trajectories' keys"
        noise_N = credit.spread(standard_normal(credit.member_keys))
        return replace(advantages, tokens=advantages.tokens + sigma * noise_N)

    return normalized


@factor(needs=("teacher",), along={"discount": 0})
def add_distillation(coefficient: float = 1.0, discount: float = 0.0) -> NormalizerFn:
    """A_t - coefficient * sum_{k>=0} discount^k (log mu - log pi_T) at t+k: a task's advantage and a teacher's.

    Name it after whiten, or the teacher's part is scaled as well. tinker-cookbook, slime.
    """
    require(coefficient > 0, f"add_distillation: coefficient={coefficient} must be positive, e.g. 1.0")
    require_share("add_distillation", "discount", discount)

    def normalized(credit: Credit, advantages: Advantages) -> Advantages:
        return replace(advantages, tokens=advantages.tokens + teacher_advantages(credit, coefficient, discount))

    return normalized


def standard_normal(keys_B: Tensor) -> Tensor:
    """One number from N(0, 1) per int64 key, by Box and Muller from two hashes. No generator: order cannot matter."""
    # In (0, 1] and [0, 1): the logarithm of the first must be finite.
    radius_B = ((_hashed(keys_B, 1) + 1).double() / 2**53).log().mul(-2).sqrt()
    angle_B = 2 * math.pi * _hashed(keys_B, 2).double() / 2**53
    return radius_B * angle_B.cos()


def _hashed(keys_B: Tensor, stream: int) -> Tensor:
    """53 bits from the key: the finalizer of splitmix64, on wrapping int64 (Steele et al. 2014)."""
    mixed_B = keys_B + _signed(stream * 0x9E3779B97F4A7C15)
    mixed_B = (mixed_B ^ _shifted(mixed_B, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed_B = (mixed_B ^ _shifted(mixed_B, 27)) * _signed(0x94D049BB133111EB)
    return _shifted(mixed_B ^ _shifted(mixed_B, 31), 11)


def _shifted(values_B: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own copies the sign."""
    return (values_B >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The int64 with the same lowest 64 bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


NORMALIZERS: dict[str, Callable[..., Normalizer]] = {
    "whiten": whiten,
    "percentile": percentile,
    "interquartile": interquartile,
    "clip_advantages": clip_advantages,
    "drop_small": drop_small,
    "gaussian_noise": gaussian_noise,
    "add_distillation": add_distillation,
}
