"""Metrics reduce as sums."""

from __future__ import annotations

import pickle

import pytest
import torch

from temper.objectives.metrics import MetricSums, largest, mean_sums, smallest


def test_means_merge_by_count_not_by_part() -> None:
    first, second = mean_sums({"x": torch.tensor([1.0, 3.0])}), mean_sums({"x": torch.tensor([4.0] * 6)})
    assert first.merge(second).finish() == {"x": 3.5}


def test_extrema_and_totals_merge() -> None:
    parts = [
        MetricSums(
            totals={"loss": value.sum().double()}, maxima={"max": largest(value)}, minima={"min": smallest(value)}
        )
        for value in (torch.tensor([1.0, -2.0]), torch.tensor([]), torch.tensor([5.0]))
    ]
    assert parts[0].merge(parts[1]).merge(parts[2]).finish() == {"loss": 4.0, "max": 5.0, "min": -2.0}


def test_metrics_over_nothing_are_left_out() -> None:
    empty = MetricSums(maxima={"max": largest(torch.tensor([]))}, minima={"min": smallest(torch.tensor([]))})
    assert empty.merge(mean_sums({"x": torch.tensor([])})).finish() == {}
    assert MetricSums().finish() == {}


def test_a_measured_nan_is_reported() -> None:
    finished = mean_sums({"x": torch.tensor([float("nan"), 1.0])}).finish()
    assert finished["x"] != finished["x"]


def test_sums_are_float64() -> None:
    values = torch.full((10_000,), 0.1, dtype=torch.float32)
    assert mean_sums({"x": values}).finish()["x"] == pytest.approx(float(values[0]), abs=1e-12)


def test_sums_travel_between_processes() -> None:
    sums = mean_sums({"x": torch.tensor([1.0, 2.0])})
    assert pickle.loads(pickle.dumps(sums)).merge(sums).finish() == {"x": 1.5}
