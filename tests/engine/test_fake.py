"""The fake sampler keeps the promises of the seam."""

from __future__ import annotations

import asyncio
import math

import pytest

from temper.types import Completion, Request, SamplingParams
from tests.fakes.sampler import FakeSampler


def generate(tokens: list[int], top: int) -> Completion:
    params = SamplingParams(max_new_tokens=8, stop_ids=(1,), top_logprobs=top)
    return asyncio.run(FakeSampler(lambda _: tokens).generate(Request(id="r", prompt_ids=(5,), params=params)))


@pytest.mark.parametrize("top", [1, 3, 4])
def test_top_tokens_start_with_the_drawn_one_and_are_a_distribution(top: int) -> None:
    completion = generate([7, 2, 1], top)
    assert completion.top_ids is not None
    assert completion.top_logprobs is not None
    for token, logprob, ids, logprobs in zip(
        completion.token_ids, completion.logprobs, completion.top_ids, completion.top_logprobs, strict=True
    ):
        assert (ids[0], logprobs[0]) == (token, logprob)
        assert len(set(ids)) == len(logprobs) == top
        assert logprobs == sorted(logprobs, reverse=True)
        assert sum(map(math.exp, logprobs)) < 1


def test_without_asking_there_are_none() -> None:
    completion = generate([7, 1], 0)
    assert completion.top_ids is None
    assert completion.top_logprobs is None
