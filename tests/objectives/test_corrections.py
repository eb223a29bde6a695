"""Sampler corrections on F1: specification 1.6."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from temper.errors import UserError
from temper.objectives import Tokens
from temper.objectives.corrections import (
    CORRECTIONS,
    geometric_keep,
    sequence_mis,
    sequence_tis,
    token_mis,
    token_tis,
    veto,
)

RHO = [1.041667, 1.25, 1.142857, 1, 5, 0.975610, 1, 0.833333]


def by_length(values):
    return [value for value, length in zip(values, [3, 2, 1, 2], strict=True) for _ in range(length)]


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (token_tis(), [*RHO[:4], 2.0, *RHO[5:]]),
        (token_mis(high=2.0), [*RHO[:4], 0.0, *RHO[5:]]),
        (token_mis(high=10.0), RHO),
        (sequence_tis(), by_length([1.488095, 2.0, 0.975610, 0.833333])),
        (sequence_tis(cap=10.0), by_length([1.488095, 5.0, 0.975610, 0.833333])),
        (sequence_mis(), by_length([1.488095, 0.0, 0.975610, 0.833333])),
        (geometric_keep(low=0.9, high=1.2), by_length([1, 0, 1, 1])),
        (geometric_keep(low=0.9, high=2.23607), by_length([1, 1, 1, 1])),
        (geometric_keep(low=0.9, high=2.23606), by_length([1, 0, 1, 1])),
        (veto(), [1.0] * 8),
        (veto(threshold=0.9), by_length([1, 1, 1, 0])),
    ],
    ids=str,
)
def test_multipliers_on_f1(f1, correction, expected) -> None:
    assert correction(f1()).multiplier.tolist() == pytest.approx(expected, abs=1e-6)


def test_acted_marks_what_was_truncated_or_rejected(f1) -> None:
    assert token_tis()(f1()).acted.tolist() == [False] * 4 + [True] + [False] * 3
    assert sequence_mis()(f1()).acted.tolist() == by_length([False, True, False, False])


@pytest.mark.parametrize("name", CORRECTIONS)
def test_multipliers_carry_no_gradient_and_survive_absurd_gaps(f1, name) -> None:
    tokens = f1(dtype=torch.float32)
    tokens = dataclasses.replace(tokens, behavior_logprobs=tokens.proximal_logprobs - 500)
    multiplier_T = CORRECTIONS[name]()(tokens).multiplier
    assert not multiplier_T.requires_grad
    assert multiplier_T.isfinite().all()


def test_truncation_and_masking_are_biased_by_the_documented_amount() -> None:
    # Every token of a 3-token vocabulary once: sums under mu are exact expectations. The true value is 0.6.
    mu, pi, advantage = (torch.tensor(x).double() for x in ([0.6, 0.3, 0.1], [0.5, 0.3, 0.2], [1.0, -1.0, 2.0]))
    tokens = Tokens(
        policy_logprobs=pi.log(),
        proximal_logprobs=pi.log(),
        behavior_logprobs=mu.log(),
        advantages=advantage,
        weights=mu,
        trajectory_ids=torch.arange(3),
        num_trajectories=3,
        num_batch_tokens=3,
        versions=torch.zeros(3, dtype=torch.int64),
    )
    corrections = (token_tis(cap=10.0), token_tis(cap=1.5), token_mis(low=0.0, high=1.5))
    values = [(mu * correct(tokens).multiplier * advantage).sum().item() for correct in corrections]
    assert values == pytest.approx([0.6, 0.5, 0.2])


def test_empty_bands_are_refused() -> None:
    for build in (token_mis, sequence_mis, geometric_keep):
        with pytest.raises(UserError, match="must be ordered"):
            build(low=2.0, high=1.0)
    with pytest.raises(UserError, match="threshold=0"):
        veto(threshold=0.0)
