"""Reward terms before credit: specification 1.1."""

from __future__ import annotations

import pytest
import torch

from temper.errors import UserError
from temper.objectives import advantages_of, resolve
from temper.objectives.shaping import kl_in_reward, soft_overlong


def test_soft_overlong_falls_from_zero_to_minus_one_over_the_buffer(credit) -> None:
    lengths = torch.tensor([10000, 16384, 18432, 20480, 20481])
    shaped = soft_overlong(buffer=4096)(credit([0.0] * 5, lengths=lengths, max_new_tokens=20480))
    assert shaped.tolist() == pytest.approx([0, 0, -0.5, -1, -1])


def test_soft_overlong_refuses_a_buffer_longer_than_the_answer(credit) -> None:
    with pytest.raises(UserError, match="buffer=4096 is longer than max_new_tokens=64"):
        soft_overlong()(credit([0.0], max_new_tokens=64))


def test_kl_in_reward_subtracts_the_sum_over_each_trajectory(credit) -> None:
    log_ratio = torch.tensor([0.1, -0.05, 0.2, 0.4], dtype=torch.float64)
    given = credit([1.0, 0.0], lengths=torch.tensor([3, 1]), reference_log_ratio=log_ratio)
    assert kl_in_reward(0.1)(given).tolist() == pytest.approx([1 - 0.025, -0.04])


def test_penalties_come_before_group_statistics(credit) -> None:
    # Shaped rewards (1, 0, 0, -0.5): applied after the normalisation, the penalty would not move the group's mean.
    shaped = resolve("dr_grpo", {"shaping": [{"name": "soft_overlong", "buffer": 2}]})
    given = credit([1, 0, 0, 0], lengths=torch.tensor([1, 1, 1, 3]))
    assert advantages_of(shaped, given).tolist() == pytest.approx([0.875, -0.125, -0.125, -0.625])


def test_kl_in_reward_declares_both_passes() -> None:
    assert kl_in_reward(0.05).needs == {"reference", "proximal"}
