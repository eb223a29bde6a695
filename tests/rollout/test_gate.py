"""One fault at a time: the gate refuses and names it."""

from __future__ import annotations

import math
import random

import pytest

from temper.errors import BackendError
from temper.rollout.gate import BUDGETS, diagnose, measure, require_agreement
from temper.types import Sample


def rows(count: int = 20, length: int = 12) -> list[Sample]:
    random_ = random.Random(0)
    return [
        Sample(
            group_id=str(k), index=0, token_ids=[1] * (length + 2), loss_mask=[0, 0] + [1] * length,
            behavior_logprobs=[0.0, 0.0] + [-random_.expovariate(1.0) for _ in range(length)],
            versions=[-1, -1] + [0] * length, advantages=[0.0] * (length + 2), weights=[0.0] * (length + 2),
        )
        for k in range(count)
    ]  # fmt: skip


def test_equal_logprobs_pass() -> None:
    samples = rows()
    agreement = measure(samples, [sample.behavior_logprobs for sample in samples])
    assert (agreement.mean_gap, agreement.max_gap, agreement.slope) == (0.0, 0.0, pytest.approx(1.0))
    require_agreement(agreement, budget=BUDGETS["float32"], when="now")


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        ("temperature", "temperature"),
        ("prompt", "extra BOS"),
        ("weights", "stale or missing weights"),
        ("nan", "not numbers"),
    ],
)
def test_each_planted_fault_is_refused_and_named(fault: str, word: str) -> None:
    samples, random_ = rows(), random.Random(1)
    recomputed = []
    for sample in samples:
        row = list(sample.behavior_logprobs)
        if fault == "temperature":
            row = [1.6 * value for value in row]
        elif fault == "prompt":
            row[2] -= 2.0
        elif fault == "weights":
            row = [value + random_.gauss(0, 0.4) * mask for value, mask in zip(row, sample.loss_mask, strict=True)]
        recomputed.append(row)
    if fault == "nan":
        recomputed[3][5] = math.nan
    agreement = measure(samples, recomputed)
    with pytest.raises(BackendError, match=word):
        require_agreement(agreement, budget=BUDGETS["bfloat16"], when="before the first step")
    assert word in diagnose(agreement)


def test_tokens_that_were_not_drawn_do_not_count() -> None:
    samples = rows()
    recomputed = [[99.0, 99.0, *sample.behavior_logprobs[2:]] for sample in samples]
    assert measure(samples, recomputed).mean_gap == 0.0
