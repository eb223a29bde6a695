"""vLLM's answers as completions, against a plain reading of the same lists. Needs no vLLM."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from temper.engine.told_routes import ToldRoutes
from temper.engine.vllm.sampling import to_completion
from temper.errors import BackendError, TaskError
from temper.models.experts.routes import RouteShape
from temper.types import Finish, Request, SamplingParams

Position = list[tuple[int, float]]


def make_output(positions: list[Position], finish: str = "stop") -> Any:
    """As vLLM's CompletionOutput with flat log-probabilities; positions begin behind something else."""
    flat, starts, ends = [(99, -9.0)], [], []
    for position in positions:
        starts.append(len(flat))
        flat += position
        ends.append(len(flat))
    logprobs = SimpleNamespace(
        start_indices=starts, end_indices=ends, token_ids=[i for i, _ in flat], logprobs=[p for _, p in flat]
    )
    spans = [SimpleNamespace(version=4, start=0, end=len(positions))]
    ids = [position[0][0] for position in positions]
    return SimpleNamespace(
        finish_reason=finish, token_ids=ids, logprobs=logprobs, weight_versions=spans, routed_experts=None
    )


def make_positions(seed: int, size: int, kept: int, listed: int) -> list[Position]:
    """`kept` tokens that hold all probability, the rest listed with none; the drawn one first, and once more."""
    draw, positions = random.Random(seed), []
    for _ in range(size):
        ids = draw.sample(range(1000), listed)
        weights = [float(draw.randint(1, 3)) for _ in range(kept)]  # ties are common
        logprobs = [math.log(weight / sum(weights)) for weight in weights] + [-math.inf] * (listed - kept)
        position = list(zip(ids, logprobs, strict=True))
        drawn = draw.randrange(kept)
        positions.append([position[drawn], *position])
    return positions


def make_request(**params: Any) -> tuple[Request, SamplingParams]:
    applied = SamplingParams(**params)
    return Request(id="r", prompt_ids=(1, 2), params=applied), applied


@pytest.mark.parametrize("size", [0, 1, 40])
def test_keep_sets_and_most_likely_tokens_are_those_of_the_lists(size: int) -> None:
    positions = make_positions(size, size, kept=5, listed=9)
    completion = to_completion(*make_request(top_k=5, top_logprobs=3, entropy=True), make_output(positions))
    finite = [{token: p for token, p in position if math.isfinite(p)} for position in positions]
    ranked = [sorted(dict(position).items(), key=lambda pair: (-pair[1], pair[0]))[:3] for position in positions]
    assert completion.token_ids == [position[0][0] for position in positions]
    assert completion.keep_ids == [sorted(kept) for kept in finite]
    assert completion.top_ids == [[token for token, _ in pairs] for pairs in ranked]
    assert completion.top_logprobs is not None
    assert completion.entropies is not None
    for found, pairs in zip(completion.top_logprobs, ranked, strict=True):
        assert list(found) == pytest.approx([p for _, p in pairs], rel=1e-6)
    entropies = [-sum(math.exp(p) * p for p in kept.values()) for kept in finite]
    assert list(completion.entropies) == pytest.approx(entropies, rel=1e-6)
    assert list(completion.logprobs) == pytest.approx([position[0][1] for position in positions], rel=1e-6)
    assert (completion.versions, completion.finish) == ([4] * size, Finish.STOP)


def test_a_completion_that_was_asked_for_nothing_more_has_nothing_more() -> None:
    completion = to_completion(*make_request(), make_output([[(7, -0.5)], [(8, -0.25)]], "length"))
    assert (completion.token_ids, completion.logprobs) == ([7, 8], [-0.5, -0.25])
    assert (completion.keep_ids, completion.top_ids, completion.entropies) == (None, None, None)
    assert completion.finish is Finish.LENGTH


ROUTES = ToldRoutes(RouteShape(layers=(0, 2), num_chosen=2, num_experts=300), num_layers=3)
"""Of three layers the middle one is dense."""


def test_routes_are_those_of_layers_with_routers_and_of_all_tokens_but_the_last() -> None:
    output = make_output([[(7, -0.5)], [(8, -0.25)]])
    output.routed_experts = np.arange(3 * 3 * 2, dtype=np.uint16).reshape(3, 3, 2)
    completion = to_completion(*make_request(), output, ROUTES)
    assert completion.routes == [[0, 1, 4, 5], [6, 7, 10, 11], [12, 13, 16, 17], []]
    assert to_completion(*make_request(), output).routes is None, "nobody asked"


def test_an_answer_that_was_dropped_at_once_has_no_routes_and_any_other_must_have_them() -> None:
    assert to_completion(*make_request(), make_output([], "abort"), ROUTES).routes == [[], []]
    with pytest.raises(BackendError, match="told no routes of request r"):
        to_completion(*make_request(), make_output([[(7, -0.5)]], "abort"), ROUTES)
    output = make_output([[(7, -0.5)]])
    output.routed_experts = np.zeros((1, 3, 2), dtype=np.uint8)
    with pytest.raises(BackendError, match="vLLM's routes are not those of 2 tokens, 3 layers and 2 experts"):
        to_completion(*make_request(), output, ROUTES)
    output.routed_experts = np.full((2, 3, 2), 300, dtype=np.uint16)
    with pytest.raises(BackendError, match="name experts from 300 to 300, and the model has 300"):
        to_completion(*make_request(), output, ROUTES)


def test_what_cannot_be_is_refused_with_the_position_that_is_wrong() -> None:
    output = make_output([[(7, -0.5)], [(9, -0.25)]])
    output.token_ids[1] = 8
    with pytest.raises(BackendError, match=r"drew token 8 and reports -0\.25 for token 9"):
        to_completion(*make_request(), output)
    with pytest.raises(BackendError, match="reports -inf for token 7"):
        to_completion(*make_request(), make_output([[(7, -math.inf)]]))
    short = [(7, math.log(0.5)), (7, math.log(0.5)), (8, math.log(0.25))]
    with pytest.raises(TaskError, match=r"\(2, holding 0\.7500 of the probability\)"):
        to_completion(*make_request(top_k=3), make_output([short]))
    with pytest.raises(TaskError, match="ended request r with 'error'"):
        to_completion(*make_request(), make_output([], "error"))
