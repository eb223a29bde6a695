"""Figures that are not means are formed from whole sums, and only where their parts are."""

from __future__ import annotations

import pytest
import torch

from temper.objectives.finish import finished
from temper.objectives.losses.preferences import MOMENTS
from temper.objectives.losses.reward_models import calibration_sums
from temper.objectives.metrics import MetricSums, mean_sums

REWARDS, LENGTHS = torch.tensor([1.0, 2.0, 3.0, 5.0]), torch.tensor([10.0, 12.0, 20.0, 19.0])


def moments(part: slice) -> MetricSums:
    rewards, lengths = REWARDS[part].double(), LENGTHS[part].double()
    values = (rewards, rewards.square(), lengths, lengths.square(), rewards * lengths)
    return mean_sums(dict(zip(MOMENTS, values, strict=True)))


def test_the_correlation_of_a_batch_is_not_the_mean_of_its_parts() -> None:
    whole = moments(slice(0, 1)).merge(moments(slice(1, 4)))
    found = finished(whole.finish() | {"loss/preference": 0.5})
    wanted = torch.corrcoef(torch.stack([REWARDS, LENGTHS]))[0, 1].item()
    assert found == {"loss/preference": 0.5, "preference/reward_length_correlation": pytest.approx(wanted, rel=1e-5)}
    half = finished(moments(slice(0, 2)).finish())
    assert half["preference/reward_length_correlation"] == pytest.approx(1.0)


def test_the_calibration_error_stands_in_place_of_its_bins() -> None:
    sums = calibration_sums(torch.tensor([0.9, 0.9, 0.1, 0.1]), torch.tensor([1.0, 0.0, 0.0, 0.0]))
    found = finished(sums.finish())
    assert found["reward_model/calibration_error"] == pytest.approx(0.5 * 0.4 + 0.5 * 0.1)
    assert not any(name.startswith("calibration/") for name in found)


def test_other_metrics_pass_unchanged() -> None:
    metrics = {"policy/kl": 0.1, "preference/reward_mean": 2.0}
    assert finished(metrics) == metrics
