"""Targets, the value loss and its metrics."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from temper.errors import UserError
from temper.objectives import resolve, targets_of
from temper.objectives.advantage.critics import CRITICS, explained_variance, gae_targets, value_loss, value_sums
from temper.objectives.advantage.normalizers import whiten
from temper.objectives.advantage.token_advantages import gae, returns_to_go


def column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_targets_of_three_tokens(credit) -> None:
    given = credit([1.0], lengths=torch.tensor([3]), values=column([0.2, 0.5, 0.7]))
    assert gae_targets()(given).tolist() == pytest.approx([0.96075, 0.985, 1.0], abs=1e-12)


def test_targets_with_lambda_one_are_the_returns(credit) -> None:
    generator = torch.Generator().manual_seed(1)
    values, inside = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    given = credit([1.0, -0.5], lengths=torch.tensor([4, 2]), values=values, token_rewards=inside)
    assert torch.allclose(gae_targets(lam=1.0)(given), returns_to_go()(given), atol=1e-12)
    assert torch.allclose(gae_targets(gamma=0.9, lam=1.0)(given), returns_to_go(gamma=0.9)(given), atol=1e-12)


def test_targets_are_made_before_whitening(credit) -> None:
    given = credit([1.0], lengths=torch.tensor([3]), values=column([0.2, 0.5, 0.7]))
    objective = resolve("grpo", {"advantage": "gae", "normalizers": ["whiten"], "critic": "gae_targets"})
    assert objective.normalizers == (whiten(),)
    assert targets_of(objective, given).tolist() == pytest.approx([0.96075, 0.985, 1.0])
    assert targets_of(resolve("grpo"), given) is None
    # Targets from whitened advantages would be something else.
    raw = gae()(given)
    assert not torch.allclose((raw - raw.mean()) / raw.std() + given.values, gae_targets()(given), atol=0.1)


def test_targets_of_truncated_answers_bootstrap_like_their_advantages(credit) -> None:
    given = credit([0.0], lengths=torch.tensor([2]), values=column([0.5, 0.8]), is_truncated=torch.tensor([True]))
    assert gae_targets(lam=1.0)(given).tolist() == pytest.approx([0.0, 0.0])
    assert gae_targets(lam=1.0, bootstrap_truncated=1)(given).tolist() == pytest.approx([0.8, 0.8])


def test_targets_of_nothing_are_nothing(credit) -> None:
    assert len(gae_targets()(credit([], [], values=column([])))) == 0


@pytest.mark.parametrize(("target", "expected"), [(0.2, 0.32), (2.0, 0.845)])
def test_value_loss_of_a_value_that_moved_too_far(target, expected) -> None:
    loss = value_loss(column([1.0]), column([0.5]), column([target]), column([1.0]), 0.2)
    assert loss.item() == pytest.approx(expected)


def test_value_loss_with_the_smaller_error_would_be_noticed() -> None:
    # V = 1 moved from 0.5 beyond 0.7 and should come back to 0.2: the minimum would forgive it and stop its gradient.
    value, old, target = column([1.0]), column([0.5]), column([0.2])
    wrong = 0.5 * torch.minimum((value - target).square(), (old + 0.2 - target).square())
    assert wrong.item() != pytest.approx(0.32)


@pytest.mark.parametrize(
    ("target", "slope"),
    [(0.2, 0.8), (2.0, 0.0), (0.9, 0.0)],
    ids=["too far, should come back", "too far, further would help", "between bound and value"],
)
def test_gradient_of_the_value_loss(target, slope) -> None:
    values = column([1.0]).requires_grad_()
    value_loss(values, column([0.5]), column([target]), column([1.0]), 0.2).backward()
    assert values.grad.item() == pytest.approx(slope)


def test_value_losses_of_microbatches_add_up() -> None:
    generator = torch.Generator().manual_seed(2)
    values, old, targets, weights = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    weights = weights.abs()
    whole = value_loss(values, old, targets, weights, 0.2)
    parts = [
        value_loss(values[part], old[part], targets[part], weights[part], 0.2) for part in (slice(0, 4), slice(4, 9))
    ]
    assert sum(parts).item() == pytest.approx(whole.item())


def test_value_loss_of_an_empty_microbatch_is_a_connected_zero() -> None:
    values = column([]).requires_grad_()
    loss = value_loss(values, column([]), column([]), column([]), 0.2)
    loss.backward()
    assert loss.item() == 0.0


def test_explained_variance_does_not_depend_on_the_split() -> None:
    values, targets = column([0.1, 0.9, 0.4, 0.3]), column([0.0, 1.0, 1.0, 0.0])
    error = targets - values
    expected = 1 - (error.var(correction=0) / (targets.var(correction=0) + 1e-5)).item()
    whole = value_sums(values, targets)
    split = value_sums(values[:1], targets[:1]).merge(value_sums(values[1:], targets[1:]))
    assert explained_variance(whole.finish()) == pytest.approx(expected)
    assert explained_variance(split.finish()) == pytest.approx(expected)
    by_part = [explained_variance(value_sums(values[p], targets[p]).finish()) for p in (slice(0, 2), slice(2, 4))]
    assert sum(part for part in by_part if part is not None) / 2 != pytest.approx(expected, abs=1e-3)


def test_explained_variance_of_perfect_constant_and_missing_predictions() -> None:
    targets = column([0.0, 1.0, 1.0])
    assert explained_variance(value_sums(targets, targets).finish()) == pytest.approx(1.0)
    constant = explained_variance(value_sums(torch.full_like(targets, 0.3), targets).finish())
    assert constant == pytest.approx(0.0, abs=1e-4)
    assert explained_variance(value_sums(targets, torch.ones_like(targets)).finish()) < -1e4
    assert explained_variance({}) is None


def test_settings_of_the_critic_are_checked_and_readable() -> None:
    critic = gae_targets(clip=0.5, pretraining_steps=50)
    assert (critic.argument("clip"), critic.argument("pretraining_steps")) == (0.5, 50)
    assert critic.needs == {"values"}
    for wrong in ({"lam": 1.1}, {"gamma": -0.1}, {"clip": 0.0}, {"pretraining_steps": -1}, {"bootstrap_truncated": 3}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            CRITICS["gae_targets"](**wrong)
