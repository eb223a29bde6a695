"""One weight per token: specification 1.7."""

from __future__ import annotations

import pytest
import torch

from temper.objectives.gates import clip
from temper.objectives.ratios import token
from temper.objectives.weighting import (
    WEIGHTINGS,
    constant_length,
    prompt_mean,
    sequence_mean,
    sequence_sum,
    token_mean,
    token_sum,
)

LENGTHS, ONE_GROUP, TWO_GROUPS = torch.tensor([3, 2, 1, 2]), torch.tensor([0] * 4), torch.tensor([0, 0, 1, 1])


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [
        (token_mean(), [1 / 8] * 4),
        (sequence_mean(), [1 / 12, 1 / 8, 1 / 4, 1 / 8]),
        (sequence_sum(), [1 / 4] * 4),
        (constant_length(), [1 / 64] * 4),
        (constant_length(length=4), [1 / 16] * 4),
        (prompt_mean(), [1 / 10, 1 / 10, 1 / 6, 1 / 6]),
        (token_sum(), [1.0] * 4),
    ],
    ids=str,
)
def test_weights_of_f1(weighting, expected) -> None:
    assert weighting(LENGTHS, TWO_GROUPS, 16).tolist() == pytest.approx(expected)


def test_prompt_mean_of_clip_on_f1(f1) -> None:
    tokens = f1()
    loss_T = -clip()(tokens, token()(tokens)).value
    weights_T = prompt_mean()(LENGTHS, TWO_GROUPS, 4).repeat_interleave(LENGTHS)
    assert (loss_T * weights_T).sum().item() == pytest.approx(0.2175)


def test_token_mean_is_not_the_mean_of_local_means(f1) -> None:
    tokens = f1()
    loss_T = -clip()(tokens, token()(tokens)).value
    weights_T = token_mean()(LENGTHS, ONE_GROUP, 4).repeat_interleave(LENGTHS)
    assert (loss_T * weights_T).sum().item() == pytest.approx(-0.019375)
    assert ((loss_T[:3].mean() + loss_T[3:].mean()) / 2).item() == pytest.approx(-0.3155)


def test_two_and_six_losses_weigh_by_token() -> None:
    weights_T = token_mean()(torch.tensor([2, 6]), torch.tensor([0, 0]), 6).repeat_interleave(torch.tensor([2, 6]))
    losses_T = torch.tensor([1.0, 3.0, *[4.0] * 6], dtype=torch.float64)
    assert (weights_T * losses_T).sum().item() == pytest.approx(3.5)


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_a_trajectory_without_tokens_counts_nowhere(name) -> None:
    weighting = WEIGHTINGS[name]()
    with_empty = weighting(torch.tensor([3, 0, 2, 0]), torch.tensor([0, 0, 1, 2]), 4)
    without = weighting(torch.tensor([3, 2]), torch.tensor([0, 1]), 4)
    assert with_empty[[0, 2]].tolist() == without.tolist()
    assert with_empty[[1, 3]].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_a_batch_without_tokens_has_zero_weights(name) -> None:
    weighting = WEIGHTINGS[name]()
    assert weighting(torch.tensor([0, 0]), torch.tensor([0, 1]), 4).tolist() == [0.0, 0.0]
    assert len(weighting(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64), 4)) == 0
