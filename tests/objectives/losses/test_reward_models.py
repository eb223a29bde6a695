"""Worked numbers of reward models, process reward models and the discriminator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from temper.errors import UserError
from temper.objectives import MetricSums
from temper.objectives.losses.reward_models import (
    UNLABELLED,
    ScoreScale,
    bradley_terry,
    calibration_error,
    calibration_sums,
    discriminator_loss,
    pair_sums,
    process_reward_loss,
    reward_model_loss,
)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_bradley_terry_gives_the_worked_numbers() -> None:
    chosen, rejected = column(1.2), column(0.5)
    assert bradley_terry(chosen, rejected).item() == pytest.approx(0.403186, abs=1e-6)
    assert bradley_terry(chosen, rejected, margin=1.0).item() == pytest.approx(0.854355, abs=1e-6)
    centred = bradley_terry(chosen, rejected, centring=0.01) - bradley_terry(chosen, rejected)
    assert centred.item() == pytest.approx(0.0289, abs=1e-9)
    assert bradley_terry(column(1.2, 1.2), column(0.5, 0.5), margin=column(0, 1)).tolist() == pytest.approx(
        [0.403186, 0.854355], abs=1e-6
    )


def test_the_worked_number_rejects_a_margin_of_the_wrong_sign() -> None:
    assert abs(bradley_terry(column(1.2), column(0.5), margin=-1.0).item() - 0.854355) > 0.1


def test_extreme_scores_give_finite_losses() -> None:
    scores = column(-1e4).requires_grad_()
    bradley_terry(scores, column(1e4)).sum().backward()
    assert scores.grad is not None
    assert scores.grad.item() == -1.0


def test_the_discriminator_gives_the_worked_number() -> None:
    assert discriminator_loss(column(1.5), column(0.5)).item() == pytest.approx(0.313262, abs=1e-6)


def test_pair_metrics_are_accuracy_margin_and_scores() -> None:
    metrics = pair_sums(column(1.0, 2.0, 0.0, 3.0), column(0.0, 3.0, 0.0, 1.0)).finish()
    expected = {"accuracy": 2.5 / 4, "margin": 0.5, "score": 1.25, "score_max": 3.0, "score_min": 0.0}
    assert {name: metrics[f"reward_model/{name}"] for name in expected} == pytest.approx(expected)


def test_calibration_compares_prediction_and_rate_in_ten_bins() -> None:
    sums = calibration_sums(column(0.05, 0.31, 0.39, 1.0), column(0, 1, 0, 1))
    metrics = sums.finish()
    assert metrics["calibration/3/predicted"] == pytest.approx(0.35)
    assert metrics["calibration/3/happened"] == pytest.approx(0.5)
    assert metrics["calibration/3/share"] == pytest.approx(0.5)
    assert "calibration/5/predicted" not in metrics
    assert calibration_error(metrics) == pytest.approx(0.25 * 0.05 + 0.5 * 0.15)


def test_scores_from_the_true_model_are_calibrated_and_doubled_scores_are_not() -> None:
    draw = torch.Generator().manual_seed(0)
    gap = torch.randn(20_000, generator=draw, dtype=torch.float64)
    is_first_better = torch.rand(20_000, generator=draw) < torch.sigmoid(gap)
    signed = torch.where(is_first_better, gap, -gap)
    zero = torch.zeros_like(signed)
    assert calibration_error(pair_sums(signed, zero).finish()) < 0.01
    assert calibration_error(pair_sums(3 * signed, zero).finish()) > 0.05


def test_no_split_of_pairs_changes_loss_gradient_or_metrics() -> None:
    draw = torch.Generator().manual_seed(1)
    chosen, rejected = (torch.randn(9, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(2))
    weights = torch.full((9,), 1 / 9, dtype=torch.float64)
    whole, metrics = reward_model_loss(chosen, rejected, weights, margin=0.3, centring=0.01)
    total, merged = torch.zeros((), dtype=torch.float64), MetricSums()
    for rows in ([8, 1], [0], [2, 3, 4, 5, 6, 7], []):
        piece, sums = reward_model_loss(chosen[rows], rejected[rows], weights[rows], margin=0.3, centring=0.01)
        total, merged = total + piece, merged.merge(sums)
    assert merged.finish() == pytest.approx(metrics.finish(), abs=1e-12)
    for left, right in zip(
        torch.autograd.grad(whole, (chosen, rejected)), torch.autograd.grad(total, (chosen, rejected)), strict=True
    ):
        assert torch.allclose(left, right, rtol=0, atol=1e-12)


def test_a_scale_standardises_with_the_constants_of_its_calibration_set() -> None:
    calibration = column(1, 2, 3, 4)
    scale = ScoreScale.of(calibration)
    assert scale.apply(calibration).mean().item() == pytest.approx(0)
    assert scale.apply(calibration).std().item() == pytest.approx(1)
    alone, among = scale.apply(column(2)), scale.apply(column(2, 100))
    assert alone[0] == among[0]
    for useless in (column(1), column(1, 1)):
        with pytest.raises(UserError, match="ScoreScale"):
            ScoreScale.of(useless)


def test_the_process_reward_loss_reads_labelled_positions_only() -> None:
    logits = torch.logit(column(0.9, 0.8, 0.7, 0.5))
    logits[3] = float("nan")
    logits.requires_grad_()
    labels = torch.tensor([1, 1, 0, UNLABELLED])
    loss, metrics = process_reward_loss(logits, labels, torch.full((4,), 1 / 3, dtype=torch.float64))
    loss.backward()
    assert loss.item() == pytest.approx(0.510826, abs=1e-6)
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx([-0.1 / 3, -0.2 / 3, 0.7 / 3, 0.0])
    assert metrics.finish()["process_reward/accuracy"] == pytest.approx(2 / 3)


def test_the_worked_number_rejects_a_mean_over_all_positions() -> None:
    logits, labels = torch.logit(column(0.9, 0.8, 0.7, 0.5)), torch.tensor([1, 1, 0, UNLABELLED])
    loss, _ = process_reward_loss(logits, labels, torch.full((4,), 1 / 4, dtype=torch.float64))
    assert abs(loss.item() - 0.510826) > 0.1
