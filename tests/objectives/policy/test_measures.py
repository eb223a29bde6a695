"""Metrics of the policy loss against plain definitions, on F1 and at random, whole and in parts.

Shapes: _T drawn tokens.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import pytest
import torch

from temper.objectives import MetricSums, Tokens, resolve
from temper.objectives.metrics import GRID_REACH, GRID_STEP, log_histogram
from temper.objectives.objective import objective_loss
from temper.objectives.policy.measures import correction_sums, mismatch_sums, policy_sums

MakeTokens = Callable[..., Tokens]


def random_tokens(seed: int, lengths: list[int]) -> list[Tokens]:
    """One Tokens per trajectory; far enough from each other for every metric to differ from its trivial value."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for length in lengths:
        proximal = -torch.randn(length, generator=generator, dtype=torch.float64).exp()
        near = [proximal + 0.5 * torch.randn(length, generator=generator, dtype=torch.float64) for _ in range(2)]
        parts.append(
            Tokens(
                policy_logprobs=near[0].clamp(max=-1e-3),
                proximal_logprobs=proximal,
                behavior_logprobs=near[1].clamp(max=-1e-3),
                advantages=torch.ones(length, dtype=torch.float64),
                weights=torch.ones(length, dtype=torch.float64),
                trajectory_ids=torch.zeros(length, dtype=torch.int64),
                num_trajectories=1,
                num_batch_tokens=sum(lengths),
                versions=torch.zeros(length, dtype=torch.int64),
            )
        )
    return parts


def merged(parts: list[Tokens], sums: Callable[[Tokens], MetricSums]) -> dict[str, float]:
    metrics = MetricSums()
    for part in parts:
        metrics = metrics.merge(sums(part))
    return metrics.finish()


def plain_percentile(ratios: list[float]) -> float:
    """Rank ceil(0.99 n) of the sorted ratios, its logarithm rounded to two digits."""
    value = sorted(ratios)[math.ceil(0.99 * len(ratios) - 1e-9) - 1]
    return math.exp(round(min(max(math.log(value), -5.0), 5.0), 2))


def test_f1_has_the_worked_numbers(f1: MakeTokens) -> None:
    tokens = f1()
    policy, mismatch = policy_sums(tokens).finish(), mismatch_sums(tokens).finish()
    for name, expected in {"ratio_max": 5.0, "ratio_min": 0.2, "kl_old_k1": -0.002190, "kl_old_k3": 0.421560,
                           "kl_ref_k1": -0.098761, "kl_ref_k3": 0.607879}.items():  # fmt: skip
        assert policy[f"policy/{name}"] == pytest.approx(expected, abs=1e-5), name
    for name, expected in {"kl_k1": -0.224990, "kl_k3": 0.305443, "chi2_token": 3.074994, "ppl_train": 3.874643,
                           "ppl_rollout": 5.377910, "log_ppl_diff": -0.205341}.items():  # fmt: skip
        assert mismatch[f"mismatch/{name}"] == pytest.approx(expected, abs=1e-5), name
    assert policy["policy/ratio_p99"] == pytest.approx(5.0, rel=0.005)  # of 8 tokens the 99th percentile is the largest
    probabilities = ([0.48, 0.16, 0.35, 0.40, 0.02, 0.82, 0.05, 0.60], [0.5, 0.2, 0.4, 0.4, 0.1, 0.8, 0.05, 0.5])
    assert mismatch["mismatch/corr"] == pytest.approx(statistics.correlation(*probabilities), abs=1e-12)


def test_f1_under_clip_and_tis_has_the_worked_shares(f1: MakeTokens) -> None:
    objective = resolve("grpo", {"corrections": ["token_tis"]})
    _, sums = objective_loss(objective, f1())
    metrics = sums.finish()
    assert metrics["policy/clip_frac_high"] == metrics["policy/clip_frac_low"] == 0.125
    assert metrics["mismatch/ess"] == pytest.approx(0.920712, abs=1e-5)
    assert metrics["mismatch/clip_frac"] == metrics["mismatch/token_tis_frac"] == 0.125
    assert metrics["mismatch/reject_frac_token"] == metrics["mismatch/reject_frac_seq"] == 0.0


def test_a_rejected_token_is_not_also_a_clipped_one(f1: MakeTokens) -> None:
    tokens = f1()
    acted = {"token_mis": torch.tensor([False] * 4 + [True] + [False] * 3)}
    multiplier_T = torch.ones(8, dtype=torch.float64)
    clipped = correction_sums(tokens, acted, multiplier_T * 2).finish()
    multiplier_T[4] = 0.0
    rejected = correction_sums(tokens, acted, multiplier_T).finish()
    assert (clipped["mismatch/clip_frac"], clipped["mismatch/reject_frac_token"]) == (0.125, 0.0)
    assert (rejected["mismatch/clip_frac"], rejected["mismatch/reject_frac_token"]) == (0.0, 0.125)


@pytest.mark.parametrize("seed", range(4))
def test_percentile_and_correlation_are_those_of_all_tokens_whatever_the_split(seed: int) -> None:
    draw = random.Random(seed)
    parts = random_tokens(seed, [draw.randint(1, 60) for _ in range(12)])
    ratios = [r for part in parts for r in (part.policy_logprobs - part.proximal_logprobs).exp().tolist()]
    mu = [p for part in parts for p in part.behavior_logprobs.exp().tolist()]
    pi = [p for part in parts for p in part.proximal_logprobs.exp().tolist()]
    expected = (plain_percentile(ratios), statistics.correlation(mu, pi))
    for _ in range(3):
        draw.shuffle(parts)
        policy, mismatch = merged(parts, policy_sums), merged(parts, mismatch_sums)
        assert policy["policy/ratio_p99"] == pytest.approx(expected[0], rel=1e-12)
        assert mismatch["mismatch/corr"] == pytest.approx(expected[1], abs=1e-9)
        assert not any("moment" in name for name in mismatch)
    # The planted fault: percentiles of parts, averaged.
    wrong = statistics.fmean(policy_sums(part).finish()["policy/ratio_p99"] for part in parts)
    assert wrong != pytest.approx(expected[0], rel=1e-3)


def test_a_policy_that_did_not_move_has_a_percentile_of_exactly_one() -> None:
    (tokens,) = random_tokens(0, [7])
    still = policy_sums(Tokens(**{name: getattr(tokens, name) for name in Tokens.__dataclass_fields__}
                               | {"policy_logprobs": tokens.proximal_logprobs}))  # fmt: skip
    assert still.finish()["policy/ratio_p99"] == 1.0


def test_the_histogram_counts_every_token_once_and_bounds_what_is_far_out() -> None:
    logarithms = torch.tensor([-30.0, -5.0, 0.0, 0.0049, 0.0051, 5.0, 30.0])
    bins = log_histogram(logarithms)
    middle = round(GRID_REACH / GRID_STEP)
    assert bins.sum() == 7
    assert (bins[0], bins[middle], bins[middle + 1], bins[-1]) == (2, 2, 1, 2)
    assert log_histogram(torch.tensor([])).sum() == 0


def test_a_percentile_of_nothing_and_a_correlation_of_constants_are_left_out() -> None:
    nothing = MetricSums(histograms={"policy/ratio_p99": log_histogram(torch.tensor([]))})
    assert nothing.finish() == {}
    (tokens,) = random_tokens(0, [1])
    assert "mismatch/corr" not in mismatch_sums(tokens).finish()
