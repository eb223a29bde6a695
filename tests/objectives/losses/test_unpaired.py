"""Worked numbers: KTO with z = 0.4 on log-ratios 1 and -1; Nash-MD by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from temper.errors import UserError
from temper.objectives import MetricSums
from temper.objectives.losses.unpaired import (
    UNPAIRED,
    LabelledCompletions,
    geometric_mixture,
    kto,
    kto_baseline,
    labelled_loss,
    mismatched_rows,
    nash_md_losses,
)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def labelled(**fields: Any) -> LabelledCompletions:
    values: dict[str, Any] = {
        "logprobs": column(-10, -14).requires_grad_(),
        "reference_logprobs": column(-11, -13),
        "is_desirable": torch.tensor([True, False]),
        "weights": column(0.5, 0.5),
        "baseline": 0.4,
    }
    return LabelledCompletions(**(values | fields))


def test_kto_gives_the_worked_losses() -> None:
    assert kto()(labelled()).tolist() == pytest.approx([0.485004, 0.465057], abs=1e-6)
    loss, metrics = labelled_loss(kto(), labelled())
    finished = metrics.finish()
    assert loss.item() == finished["loss/preference"] == pytest.approx(0.4750305, abs=1e-6)
    assert finished["preference/desirable_reward"] == pytest.approx(0.1)
    assert finished["preference/undesirable_reward"] == pytest.approx(-0.1)


def test_kto_weighs_the_two_labels_and_pushes_them_apart() -> None:
    given = labelled()
    losses = kto(desirable_weight=2.0, undesirable_weight=3.0)(given)
    assert losses.tolist() == pytest.approx([2 * 0.485004, 3 * 0.465057], abs=1e-5)
    losses.sum().backward()
    assert given.logprobs.grad is not None
    assert given.logprobs.grad[0] < 0 < given.logprobs.grad[1]


def test_the_baseline_is_measured_on_the_previous_rows_completion_and_is_never_negative() -> None:
    assert mismatched_rows(3) == [2, 0, 1]
    assert kto_baseline(column(-9, -10), column(-10, -9.8)) == pytest.approx(0.4)
    assert kto_baseline(column(-12, -10), column(-10, -9.8)) == 0.0
    with pytest.raises(UserError, match="batch of 1"):
        mismatched_rows(1)


def test_no_split_of_labelled_completions_changes_loss_gradient_or_metrics() -> None:
    draw = torch.Generator().manual_seed(0)
    columns = {
        "logprobs": torch.randn(7, generator=draw, dtype=torch.float64).requires_grad_(),
        "reference_logprobs": torch.randn(7, generator=draw, dtype=torch.float64),
        "is_desirable": torch.rand(7, generator=draw) < 0.5,
        "weights": torch.full((7,), 1 / 7, dtype=torch.float64),
    }
    whole, metrics = labelled_loss(kto(), labelled(**columns))
    total, merged = torch.zeros((), dtype=torch.float64), MetricSums()
    for rows in ([4], [], [0, 6, 2], [5, 3, 1]):
        piece, sums = labelled_loss(kto(), labelled(**{name: value[rows] for name, value in columns.items()}))
        total, merged = total + piece, merged.merge(sums)
    assert merged.finish() == pytest.approx(metrics.finish(), abs=1e-12)
    for left, right in zip(
        torch.autograd.grad(whole, columns["logprobs"]), torch.autograd.grad(total, columns["logprobs"]), strict=True
    ):
        assert torch.allclose(left, right, rtol=0, atol=1e-12)


def test_nash_md_is_a_policy_gradient_with_the_penalty_as_a_constant() -> None:
    policy = column(-1, -2, -0.5).requires_grad_()
    losses = nash_md_losses(policy, column(-1.5, -1, -0.5), torch.tensor([0, 0, 1]), column(0.8, 0.2), beta=0.1)
    # First: -(0.3)(-3) + 0.1 (0.5 * -1 + -1 * -2); second: -(-0.3)(-0.5).
    assert losses.tolist() == pytest.approx([0.9 + 0.15, -0.15])
    losses.sum().backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([-0.3 + 0.05, -0.3 - 0.1, 0.3])


def test_a_penalty_with_gradient_would_be_another_gradient() -> None:
    policy, reference = column(-1, -2).requires_grad_(), column(-1.5, -1)
    (right,) = torch.autograd.grad(
        nash_md_losses(policy, reference, torch.zeros(2, dtype=torch.int64), column(0.5)).sum(), policy
    )
    (wrong,) = torch.autograd.grad((0.1 * (policy - reference) * policy).sum(), policy)
    assert not torch.allclose(right, wrong)


def test_the_opponent_is_the_normalised_geometric_mean() -> None:
    policy, reference = column(0.5, 0.3, 0.2).log(), column(0.2, 0.5, 0.3).log()
    mean = (column(0.5, 0.3, 0.2) * column(0.2, 0.5, 0.3)).sqrt()
    assert torch.allclose(geometric_mixture(policy, reference).exp(), mean / mean.sum())
    assert torch.allclose(geometric_mixture(policy + 3, reference, share=0.0), policy)
    assert torch.allclose(geometric_mixture(policy, reference - 1, share=1.0), reference)
    with pytest.raises(UserError, match=r"share=1\.5"):
        geometric_mixture(policy, reference, share=1.5)


def test_a_reference_with_gradient_is_refused_and_needed() -> None:
    with pytest.raises(AssertionError, match="must not carry a gradient"):
        labelled(reference_logprobs=column(-11, -13).requires_grad_())
    assert all(build().needs == {"reference"} for build in UNPAIRED.values())


def test_the_worked_numbers_reject_a_baseline_of_the_wrong_sign() -> None:
    assert abs(kto()(labelled(baseline=-0.4))[0].item() - 0.485004) > 1e-3
