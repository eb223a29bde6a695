"""Estimators against exact enumeration, closed forms and seeded simulation."""

from __future__ import annotations

import math
import statistics
from itertools import combinations

import numpy as np
import pytest

from temper.evals import passk
from temper.evals.passk import clustered_interval, pass_at_k, t_quantile, wilson


def test_pass_at_k_equals_enumeration_of_all_subsets_up_to_eight_samples() -> None:
    for n in range(1, 9):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(combinations([1] * c + [0] * (n - c), k))
                exact = sum(any(subset) for subset in subsets) / len(subsets)
                assert pass_at_k(n, c, k) == pytest.approx(exact, abs=1e-12), (n, c, k)


def test_pass_at_k_worked_numbers() -> None:
    assert [round(pass_at_k(10, 3, k), 6) for k in (1, 2, 4, 8)] == [0.3, 0.533333, 0.833333, 1.0]


def test_the_plug_in_estimator_would_fail_the_enumeration() -> None:
    assert abs((1 - (1 - 3 / 10) ** 4) - pass_at_k(10, 3, 4)) > 0.05


def test_pass_at_k_survives_numbers_whose_binomials_overflow_a_float() -> None:
    exact = 1 - math.comb(9_990, 64) / math.comb(10_000, 64)
    assert pass_at_k(10_000, 10, 64) == pytest.approx(exact, rel=1e-9)


def test_wilson_worked_numbers_and_ends() -> None:
    # The bounds are the p at which the observed share is just 1.96 standard errors away: (x - p)^2 = z^2 p (1 - p) / n.
    for bound in wilson(7, 10):
        assert (0.7 - bound) ** 2 == pytest.approx(3.8414588 * bound * (1 - bound) / 10, rel=1e-7)
    low, high = wilson(0, 50)
    assert low == 0.0
    assert high == pytest.approx(3.8414588 / (50 + 3.8414588), abs=1e-6)
    assert wilson(50, 50) == pytest.approx((1 - high, 1.0), abs=1e-12)


def test_one_sample_per_prompt_is_exactly_wilson() -> None:
    scores = [[1.0]] * 7 + [[0.0]] * 3
    assert clustered_interval(scores) == (0.7, *wilson(7, 10))


def test_repeating_the_same_verdict_adds_no_information() -> None:
    # Every prompt always passes or always fails: 8 samples of a prompt are one observation.
    once = [[1.0]] * 70 + [[0.0]] * 30
    eight = [scores * 8 for scores in once]
    _, low_once, high_once = clustered_interval(once)
    _, low, high = clustered_interval(eight)
    assert high - low == pytest.approx(high_once - low_once, rel=0.03)
    naive_low, naive_high = wilson(560, 800)
    assert high - low > 2.5 * (naive_high - naive_low), "counting samples as independent must look different"


def test_independent_samples_count_in_full() -> None:
    generator = np.random.default_rng(0)
    scores = generator.integers(0, 2, (400, 4)).astype(float).tolist()
    mean, low, high = clustered_interval(scores)
    naive_low, naive_high = wilson(mean * 1600, 1600)
    assert high - low == pytest.approx(naive_high - naive_low, rel=0.1)


def test_unanimous_scores_still_leave_doubt() -> None:
    mean, low, high = clustered_interval([[1.0] * 4] * 20)
    assert (mean, high) == (1.0, 1.0)
    assert 0.78 < low < 0.86


def test_prompts_weigh_alike_and_empty_ones_are_left_out() -> None:
    mean, *_ = clustered_interval([[1.0, 1.0, 1.0], [0.0], []])
    assert mean == 0.5


def test_scores_without_bounds_use_the_t_interval_over_prompts() -> None:
    # Prompt means 2 4 6 8: standard deviation 2.58199, error 1.290994, t(3) = 3.182446.
    mean, low, high = clustered_interval([[2.0], [3.0, 5.0], [6.0], [8.0]])
    assert mean == pytest.approx(5.0)
    assert high - mean == pytest.approx(3.182446 * 1.290994, rel=2e-3)
    assert mean - low == pytest.approx(high - mean)
    assert clustered_interval([[2.0, 3.0]])[1:] == (-math.inf, math.inf), "one prompt says nothing about others"


def test_graded_scores_of_many_prompts_have_the_t_interval_nearly() -> None:
    scores = [[place / 1000] for place in range(200, 801)]
    mean, low, high = clustered_interval(scores)
    half = t_quantile(600) * statistics.stdev(score for (score,) in scores) / math.sqrt(601)
    assert (mean - low, high - mean) == pytest.approx((half, half), rel=0.01)


@pytest.mark.parametrize("scores", [[0.5] * 4, [0.1, 0.1, 0.1, 0.9], [0.0, 0.05], [1.0, 0.95, 1.0], [0.3]])
def test_intervals_of_shares_are_shares_and_never_without_width(scores: list[float]) -> None:
    mean, low, high = clustered_interval([[score] for score in scores])
    assert 0.0 <= low < mean < high <= 1.0
    assert high - low > 0.2, "so few prompts leave doubt"


def test_t_quantiles_agree_with_tables() -> None:
    table = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 10: 2.2281, 30: 2.0423, 120: 1.9799}
    for degrees, value in table.items():
        assert t_quantile(degrees) == pytest.approx(value, rel=2e-3), degrees


def coverage(num_prompts: int, samples: int, concentration: float, centre: float, rounds: int = 3000) -> float:
    """Share of simulated evaluations whose interval holds the true mean; pass rates are Beta distributed."""
    generator = np.random.default_rng(7)
    hits = 0
    for _ in range(rounds):
        rates = generator.beta(centre * concentration, (1 - centre) * concentration, num_prompts)
        scores = (generator.random((num_prompts, samples)) < rates[:, None]).astype(float).tolist()
        _, low, high = clustered_interval(scores)
        hits += low <= centre <= high
    return hits / rounds


@pytest.mark.parametrize(
    ("num_prompts", "samples", "concentration", "centre"),
    [(100, 1, 1.0, 0.3), (60, 4, 0.5, 0.5), (60, 4, 5.0, 0.1), (30, 8, 0.3, 0.9), (200, 4, 50.0, 0.97)],
)
def test_the_interval_covers_the_truth_in_95_of_100_evaluations(
    num_prompts: int, samples: int, concentration: float, centre: float
) -> None:
    assert 0.93 <= coverage(num_prompts, samples, concentration, centre) <= 0.985


@pytest.mark.parametrize(("num_prompts", "centre"), [(8, 0.5), (30, 0.2), (200, 0.9)])
def test_the_interval_of_graded_scores_covers_the_truth(num_prompts: int, centre: float) -> None:
    generator = np.random.default_rng(3)
    scores = generator.beta(2 * centre, 2 * (1 - centre), (2000, num_prompts))
    bounds = [clustered_interval([[score] for score in row])[1:] for row in scores.tolist()]
    assert 0.93 <= np.mean([low <= centre <= high for low, high in bounds]) <= 0.99


def test_ignoring_the_clusters_would_lose_the_coverage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passk, "effective_size", lambda mean, error, num_prompts, num_samples: num_samples)
    assert coverage(60, 4, 0.5, 0.5, rounds=800) < 0.85
