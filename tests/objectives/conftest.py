"""F1: one task, four completions of 3, 2, 1 and 2 tokens, rewards (1, 0, 0, 0)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from temper.objectives import Credit, Extent, Tokens
from temper.objectives.policy.weighting import token_sum

LENGTHS = [3, 2, 1, 2]
POLICY = [0.55, 0.30, 0.28, 0.36, 0.02, 0.88, 0.25, 0.445]
PROXIMAL = [0.50, 0.20, 0.40, 0.40, 0.10, 0.80, 0.05, 0.50]
BEHAVIOR = [0.48, 0.16, 0.35, 0.40, 0.02, 0.82, 0.05, 0.60]
REFERENCE = [0.45, 0.25, 0.30, 0.42, 0.15, 0.75, 0.10, 0.45]


@pytest.fixture
def f1() -> Callable[..., Tokens]:
    """Makes the tokens of F1; keywords replace fields, `weighting` (a factor) makes the weights."""

    def make(*, dtype: torch.dtype = torch.float64, weighting: Any = None, length: int = 4, **fields: Any) -> Tokens:
        lengths_B, group_ids_B = torch.tensor(LENGTHS), torch.zeros(4, dtype=torch.int64)
        weights_B = (weighting or token_sum())(Extent(lengths=lengths_B, group_ids=group_ids_B, max_new_tokens=length))

        def logs(probabilities: list[float]) -> Tensor:
            return torch.tensor(probabilities, dtype=torch.float64).log().to(dtype)

        values: dict[str, Any] = {
            "policy_logprobs": logs(POLICY).requires_grad_(),
            "proximal_logprobs": logs(PROXIMAL),
            "behavior_logprobs": logs(BEHAVIOR),
            "reference_logprobs": logs(REFERENCE),
            "advantages": torch.tensor([1.5, -0.5, -0.5, -0.5], dtype=dtype).repeat_interleave(lengths_B),
            "weights": weights_B.to(dtype).repeat_interleave(lengths_B),
            "trajectory_ids": torch.arange(4).repeat_interleave(lengths_B),
            "num_trajectories": 4,
            "num_batch_tokens": 8,
            "versions": torch.zeros(8, dtype=torch.int64),
        }
        return Tokens(**(values | fields))

    return make


@pytest.fixture
def credit() -> Callable[..., Credit]:
    """Credit of one batch from rewards and group ids."""

    def make(rewards: list[float], group_ids: list[int] | None = None, **fields: Any) -> Credit:
        count = len(rewards)
        values: dict[str, Any] = {
            "rewards": torch.tensor(rewards, dtype=torch.float64),
            "group_ids": torch.tensor(group_ids or [0] * count, dtype=torch.int64),
            "lengths": torch.ones(count, dtype=torch.int64),
            "is_truncated": torch.zeros(count, dtype=torch.bool),
            "max_new_tokens": 4,
        }
        return Credit(**(values | fields))

    return make
