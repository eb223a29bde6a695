"""beta-DPO: which pairs are kept, and which beta they get."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from temper.errors import UserError
from temper.objectives.losses.beta_dpo import MarginState, beta_dpo


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_beta_of_beta_dpo_follows_the_kept_margins() -> None:
    # M = 0.9 M_0 + 0.1 * 2 = 1.2 with M_0 = 10/9; kept mean 2: 0.1 (1 + 0.6 * 0.8).
    choice = beta_dpo(column(2, 2, 2, 2, 2), MarginState(mean=1 / 0.9, std=1.0), seed=0)
    assert choice.beta == pytest.approx(0.148, abs=1e-6)
    assert choice.state.mean == pytest.approx(1.2)
    assert choice.state.std == pytest.approx(0.9)
    assert choice.is_kept.sum() == 4


def test_beta_dpo_starts_at_the_statistics_of_the_first_batch_and_has_a_floor() -> None:
    margins = column(-1, 0, 1, 2)
    choice = beta_dpo(margins, None, seed=3)
    assert choice.state == MarginState(mean=pytest.approx(0.5), std=pytest.approx(margins.std().item()))
    assert beta_dpo(margins, MarginState(mean=100, std=1), seed=3).beta == 1e-3
    assert beta_dpo(column(3), None, seed=0).is_kept.tolist() == [True]


def test_beta_dpo_drops_outliers_first_and_draws_by_its_seed() -> None:
    margins = torch.cat([torch.linspace(-1, 1, 8, dtype=torch.float64), column(1e4, -1e4)])
    state = MarginState(mean=0.0, std=1.0)
    for seed in range(20):
        choice = beta_dpo(margins, state, seed, decay=1.0)
        assert choice.is_kept.tolist() == [True] * 8 + [False] * 2
    calm = margins[:8]
    kept = {tuple(beta_dpo(calm, state, seed).is_kept.tolist()) for seed in range(20)}
    assert len(kept) > 1
    assert torch.equal(beta_dpo(calm, state, 5).is_kept, beta_dpo(calm, state, 5).is_kept)


def test_beta_dpo_draws_with_the_weights_it_promises() -> None:
    # Two of which one is kept: P(first) = w_1 / (w_1 + w_2), weights exp(-d^2 / 2) around 0.
    state = MarginState(mean=0.0, std=1.0)
    kept = [beta_dpo(column(0, 1), state, seed, dropped=0.5, decay=1.0).is_kept[0].item() for seed in range(3000)]
    assert sum(kept) / len(kept) == pytest.approx(1 / (1 + 2.718281828**-0.5), abs=0.03)


def test_the_beta_and_the_pairs_are_constants() -> None:
    choice = beta_dpo(column(1, 2, 3).requires_grad_(), None, seed=0)
    assert isinstance(choice.beta, float)
    assert not choice.is_kept.requires_grad


def test_settings_without_meaning_are_refused() -> None:
    with pytest.raises(UserError, match="dropped=1"):
        beta_dpo(column(1), None, 0, dropped=1.0)


def test_the_worked_number_rejects_a_mean_over_the_dropped_pairs_as_well() -> None:
    # The outlier is dropped: a beta from the mean of all margins would be another one.
    margins = column(1, 1, 1, 1, 50)
    choice = beta_dpo(margins, MarginState(mean=1.0, std=0.1), seed=0, decay=1.0)
    assert choice.beta == pytest.approx(0.1)
    assert abs(0.1 * (1 + 0.6 * (margins.mean().item() - 1.0)) - choice.beta) > 0.1
