"""Warming up ahead of a run: nothing is left to record, and nothing else is different.

As in test_graphs.py a CPU does what a GPU would.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from temper.engine.local import chunks
from temper.engine.local.chunks import ChunkGraphs, Size
from temper.engine.local.engine import LocalEngine
from temper.engine.local.graphs import DecodeGraphs, DecodeWork, GraphKey, GraphLimits
from temper.engine.local.warming import ExpectedRequests, chunk_sizes, decode_keys
from temper.models.kernels.tiled_attention import choose_splits
from temper.types import Completion, Request, SamplingParams
from tests.engine.local.test_graphs import make_engine, run_again

CPU = torch.device("cpu")
PARAMS = SamplingParams(max_new_tokens=2)
EXPECTED = ExpectedRequests(num_rows=1, num_prompts=1, prompt_tokens=5, longest=7, params=PARAMS)


@pytest.fixture
def _small_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter needs seconds for what a GPU does not notice."""
    monkeypatch.setattr(chunks, "LEAST", Size(tokens=8, rows=1, longest=8))


def in_interpreter(test: Callable[[], None]) -> Callable[[], None]:
    """Runs a test whose kernels are interpreted: it counts recordings, which a GPU makes in its own way."""
    is_missing = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1"
    test = pytest.mark.usefixtures("triton_interpreter", "_small_passes")(test)
    return pytest.mark.skipif(is_missing, reason="needs TRITON_INTERPRET=1 before triton is imported, and no GPU")(test)


def count_recordings(engine: LocalEngine) -> list[int]:
    """A list that grows with every recording."""
    counted: list[int] = []

    def record(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        counted.append(1)
        return run_again(work)

    runner: Any = engine._runner
    runner._graphs._record = runner._chunk_graphs._record = record
    return counted


def warm(engine: LocalEngine) -> list[tuple[int, int]]:
    told: list[tuple[int, int]] = []
    asyncio.run(engine.warm_up(EXPECTED, lambda done, total: told.append((done, total))))
    return told


def draw(engine: LocalEngine, name: str, tokens: int) -> Completion:
    asked = Request(id=name, prompt_ids=(7, 2, 9, 4, 6), params=SamplingParams(max_new_tokens=tokens))
    return asyncio.run(engine.generate(asked))


def counts(engine: LocalEngine) -> dict[str, float]:
    clocks = ("tok_s", "seconds")
    return {name: value for name, value in engine.stats().items() if not name.endswith(clocks)}


@in_interpreter
def test_a_warm_engine_records_nothing_more_and_draws_what_a_cold_one_draws() -> None:
    """Tokens and log-probabilities to the bit, counts, the prefix cache and the state of torch's own numbers. The
    second time the prompt is found in the cache: one that a recording wrote into would answer otherwise."""
    cold, warmed = make_engine(as_gpu=True), make_engine(as_gpu=True)
    for engine in (cold, warmed):
        engine._model.model.layers = engine._model.model.layers[:1]  # half the work of an interpreter
    recorded, torch_state = count_recordings(warmed), torch.get_rng_state()
    told = warm(warmed)
    assert told == [(done, len(told)) for done in range(len(told))]
    assert len(recorded) == len(told) - 1, "the last piece draws once, and records nothing"
    assert torch.equal(torch_state, torch.get_rng_state())
    require_same(cold, warmed, "first", tokens=2)
    assert len(recorded) == len(told) - 1
    warmed._runner._graphs._recorded.clear()  # what is recorded anew runs anew
    warm(warmed)
    require_same(cold, warmed, "again", tokens=1)


def require_same(cold: LocalEngine, warmed: LocalEngine, name: str, *, tokens: int) -> None:
    one, other = draw(cold, name, tokens), draw(warmed, name, tokens)
    assert one.token_ids == other.token_ids
    assert one.logprobs == other.logprobs
    assert counts(cold) == counts(warmed)


@in_interpreter
def test_running_requests_forbid_it() -> None:
    engine = make_engine(as_gpu=True)

    async def run() -> None:
        asked = Request(id="r", prompt_ids=(3, 4), params=SamplingParams(max_new_tokens=1))
        drawing = asyncio.ensure_future(engine.generate(asked))
        await asyncio.sleep(0)
        with pytest.raises(AssertionError, match="overwrite"):
            await engine.warm_up(EXPECTED, lambda done, total: None)
        await drawing

    asyncio.run(run())


def test_an_engine_without_recordings_has_nothing_to_warm() -> None:
    assert warm(make_engine(as_gpu=False)) == []


@pytest.mark.parametrize(
    "asked", [{}, {"top_k": 5}, {"top_p": 0.9, "min_p": 0.1}, {"top_logprobs": 3, "entropy": True}]
)
def test_a_first_token_is_drawn_for_nobody_however_requests_draw(asked: dict[str, Any]) -> None:
    expected = expect(params=SamplingParams(max_new_tokens=4, **asked))
    make_engine(as_gpu=False)._runner._draw_for_nobody(expected.first_draw)
    assert expected.first_draw.is_plain is (not asked)


def decode_graphs(max_rows: int, kv_heads: int) -> DecodeGraphs:
    work = DecodeWork(
        lambda *_: torch.zeros(1),
        lambda hidden: hidden,
        lambda rows, longest: choose_splits(rows, kv_heads, longest, 132),
    )
    return DecodeGraphs(work, GraphLimits(max_rows=max_rows, max_blocks=4, max_steps=1), 16, CPU, run_again)


def expect(**changed: Any) -> ExpectedRequests:
    plain: dict[str, Any] = {"num_rows": 1, "num_prompts": 1, "prompt_tokens": 60, "longest": 316, "params": PARAMS}
    return ExpectedRequests(**{**plain, **changed})


def test_a_rollout_passes_through_all_sizes_below_its_own() -> None:
    keys = decode_keys(decode_graphs(600, kv_heads=3), expect(num_rows=600))
    assert [key.size for key in keys] == [640, 512, 384, 256, 128, 64, 32, 16, 8, 4, 2, 1]
    assert {key.draws for key in keys} == {True}


def test_lengths_that_are_computed_alike_share_a_recording() -> None:
    """Many rows keep all multiprocessors busy at any length; few long ones are split the more the longer they are."""
    keys = decode_keys(decode_graphs(256, kv_heads=2), expect(num_rows=256, longest=8192 + 60))
    by_size = {size: [key.splits for key in keys if key.size == size] for size in (256, 64, 8, 1)}
    assert by_size == {256: [1], 64: [1, 2, 4], 8: [1, 2, 4, 8, 16, 32], 1: [1, 2, 4, 8, 16, 32]}


def test_what_is_asked_beside_tokens_needs_graphs_that_end_with_states() -> None:
    asked = SamplingParams(max_new_tokens=4, top_k=5)
    assert decode_keys(decode_graphs(1, kv_heads=2), expect(params=asked)) == [GraphKey(1, 1, draws=False)]


@pytest.mark.parametrize(
    ("num_prompts", "prompt_tokens", "expected"),
    [
        (32, 60, [(2048, 32, 256), (1024, 16, 256), (512, 8, 256), (256, 8, 256)]),
        (256, 60, [(4096, 128, 256), (4096, 64, 256), (2048, 32, 256), (1024, 16, 256), (512, 8, 256), (256, 8, 256)]),
        (4, 6000, [(4096, 8, 4096)]),
    ],
)
def test_prompts_start_in_passes_of_a_few_sizes(
    num_prompts: int, prompt_tokens: int, expected: list[tuple[int, int, int]]
) -> None:
    limits = GraphLimits(max_rows=256, max_blocks=4, max_steps=1)
    graphs = ChunkGraphs(lambda *_: torch.zeros(1), limits, CPU, run_again)
    found = chunk_sizes(graphs, expect(num_prompts=num_prompts, prompt_tokens=prompt_tokens), tokens_per_step=4096)
    assert found == [Size(*size) for size in expected]
