"""How sure a held-out score is: unbiased pass@k and 95% intervals.

Owns: estimators, as pure functions of scores. Refuses: running anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

Z_95 = 1.959963984540054
"""Two-sided 95% point of the normal distribution."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k samples drawn without replacement from n, of which c are correct, hold a correct one.

    1 - C(n - c, k) / C(n, k), as a product that neither overflows nor cancels. 1 - (1 - c/n)^k, the plug-in that is
    often printed instead, is biased low. Chen et al. 2021, eq. 1.
    """
    assert 0 <= c <= n, f"pass@k needs 0 <= c <= n, got c={c}, n={n}"
    assert 1 <= k <= n, f"pass@k needs 1 <= k <= n, got k={k}, n={n}"
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / j for j in range(n - c + 1, n + 1))


def wilson(successes: float, n: float, z: float = Z_95) -> tuple[float, float]:
    """Wilson's score interval of a proportion. Unlike the textbook one it is sane at 0 of n and n of n.

    n may be an effective number of samples and need not be whole.
    """
    assert 0 <= successes <= n > 0, f"wilson needs 0 <= successes <= n, got {successes} of {n}"
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # At the ends the exact bound is the end itself; rounding would put the score outside its own interval.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return low, high


def clustered_interval(scores_per_prompt: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Mean over prompts of the mean over samples, with a 95% interval: (mean, low, high).

    Samples of one prompt resemble each other, so prompts, not samples, are the unit: eight samples of 100 prompts are
    not 800 observations. With scores from 0 to 1 this is Wilson's interval at the effective number of samples that the
    spread between prompts implies (exactly Wilson's when every prompt has one 0/1 sample), which stays between 0 and 1
    and has a width where all scores are alike; otherwise a t interval over prompts. Prompts without scored samples are
    left out.
    """
    prompts = [list(scores) for scores in scores_per_prompt if len(scores)]
    assert prompts, "an interval needs at least one scored prompt"
    means = [fmean(scores) for scores in prompts]
    num_prompts, num_samples = len(prompts), sum(len(scores) for scores in prompts)
    mean = fmean(means)
    is_binary = all(score in (0.0, 1.0) for scores in prompts for score in scores)
    if is_binary and num_samples == num_prompts:
        return mean, *wilson(sum(means), num_prompts)
    is_share = all(0.0 <= score <= 1.0 for scores in prompts for score in scores)
    if num_prompts == 1:
        # One prompt says nothing about others: count a share of it as one observation, otherwise give up.
        return mean, *(wilson(mean, 1) if is_share else (-math.inf, math.inf))
    error = stdev(means) / math.sqrt(num_prompts)
    quantile = t_quantile(num_prompts - 1)
    if not is_share:
        return mean, mean - quantile * error, mean + quantile * error
    # Parts of a point spread less than points do: no number of samples bounds what they are worth.
    most = num_samples if is_binary else math.inf
    size = effective_size(mean, error, num_prompts, most) if is_binary or error else num_prompts
    return mean, *wilson(min(mean * size, size), size, quantile)


def effective_size(mean: float, error: float, num_prompts: int, num_samples: float) -> float:
    """How many independent 0/1 samples would have this standard error: at least the prompts, at most all samples."""
    if mean in (0.0, 1.0):
        return num_prompts  # no spread to judge by: assume that samples of a prompt all agree
    if error == 0.0:
        return num_samples
    return min(max(mean * (1 - mean) / error**2, num_prompts), num_samples)


def t_quantile(degrees: int) -> float:
    """Two-sided 95% point of Student's t: exact for 1 and 2 degrees, else Fisher's expansion, within 0.2%.

    Abramowitz and Stegun 26.7.5.
    """
    if degrees <= 2:
        return (12.706204736432095, 4.302652729696142)[degrees - 1]
    z, v = Z_95, float(degrees)
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )
