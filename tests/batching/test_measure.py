"""Metrics of a batch: specification 5.1, 5.3, 5.4, 5.5."""

from __future__ import annotations

import pytest
import torch

from temper.batching.measure import measure_advantages, measure_groups
from temper.types import Status


def test_shares_are_over_generated_groups_trained_and_dropped(group) -> None:
    trained = [group([(1.0, 2), (0.0, 4)])]
    dropped = [
        (group([(1.0, 1), (1.0, 1)], draw=1), "degenerate"),
        (group([(0.0, 1), (0.0, 1)], draw=2), "degenerate"),
        (group([(0.5, 1), (0.5, 1)], draw=3), "degenerate"),
    ]
    metrics = measure_groups(trained, dropped, version=0)
    assert metrics["data/degenerate"] == 0.75
    assert metrics["data/all_pass"] == 0.25
    assert metrics["data/all_fail"] == 0.25
    assert metrics["data/effective_groups"] == 1
    assert metrics["data/gen_factor"] == 4
    assert metrics["reward/mean"] == 0.5


def test_equal_rewards_are_counted_as_degenerate_despite_float_noise(group) -> None:
    noisy = torch.tensor([0.1] * 7, dtype=torch.float32).tolist()
    noisy[0] += 1e-9
    assert measure_groups([group([(r, 1) for r in noisy])], [], version=0)["data/degenerate"] == 1.0


def test_rewards_and_lengths(group) -> None:
    statuses = [Status.COMPLETED, Status.TRUNCATED_LENGTH, Status.COMPLETED, Status.TIMEOUT]
    metrics = measure_groups([group([(1.0, 3), (0.0, 2), (None, 1), (0.0, 2)], statuses=statuses)], [], version=0)
    assert metrics["reward/mean"] == 0.5
    assert metrics["reward/std"] == 0.5
    assert metrics["gen/len_mean"] == 2
    assert metrics["gen/len_max"] == 3
    assert metrics["gen/truncation_rate"] == 0.25
    assert metrics["data/unscorable"] == 1
    assert metrics["data/env_error"] == 1


def test_staleness_is_that_of_the_oldest_token(group, turn) -> None:
    mixed = [turn([1], [2], version=3), turn([1, 2], [3], version=5)]
    fresh = [turn([1], [2, 3], version=6)]
    metrics = measure_groups([group([(1.0, mixed), (0.0, fresh)])], [], version=6)
    assert metrics["stale/max"] == 3
    assert metrics["stale/mean"] == 1.5
    assert metrics["stale/mixed_version_frac"] == 0.5


def test_advantages_are_measured_over_trajectories() -> None:
    advantages_N = torch.tensor([1.5] * 3 + [-0.5] * 3 + [0.0] * 2, dtype=torch.float64)
    metrics = measure_advantages(advantages_N, torch.tensor([3, 2, 1, 2]))
    assert metrics["adv/abs_mean"] == pytest.approx(0.625)
    assert metrics["adv/mean"] == pytest.approx(0.125)
    assert metrics["adv/frac_zero"] == 0.25
    assert (metrics["adv/min"], metrics["adv/max"]) == pytest.approx((-0.5, 1.5))


def test_nothing_generated_measures_nothing_but_counts() -> None:
    assert measure_groups([], [], version=0) == {"data/unscorable": 0.0, "data/env_error": 0.0}
    assert measure_advantages(torch.tensor([]), torch.tensor([], dtype=torch.int64)) == {}
