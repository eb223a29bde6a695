"""What a GPU does, done by a CPU: kernels in Triton's interpreter, recorded steps simply run again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from temper.engine.local import chunks, runner
from temper.engine.local.attention import PagedCache
from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.engine.local.graphs import GraphLimits, bucket
from temper.engine.local.runner import Runner
from temper.errors import BackendError
from temper.models.decode_step.step import DecodeStep
from temper.models.decoder import set_numerics
from temper.models.float8.layers import float8_copy
from temper.models.load import prepare
from temper.models.nf4.holding import hold_in_four_bits
from temper.models.save import saved_tensors
from temper.types import Completion, Publication, Request, SamplingParams
from tests.fakes.selection import mostly_slow

pytest.importorskip("triton", reason="needs triton: pip install triton")
pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.skipif(
        not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
        reason="without a GPU the kernels need TRITON_INTERPRET=1 before triton is imported",
    ),
]


LEAST = chunks.LEAST


@pytest.fixture(autouse=True)
def _small_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter needs seconds for what a GPU does not notice."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(chunks, "LEAST", chunks.Size(tokens=8, rows=1, longest=8))


def run_again(work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    output = work()

    def replay() -> None:
        output.copy_(work())

    return replay, output


def make_engine(
    *, as_gpu: bool, numerics: Any = "fast", steps: int = 1, weights: str = "full", dtype: torch.dtype = torch.float32
) -> LocalEngine:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    on_gpu = as_gpu and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    model = prepare(LlamaForCausalLM(config).eval()).to(device, dtype)
    if weights == "4bit":
        hold_in_four_bits(model, device)
    set_numerics(model, numerics)
    model = float8_copy(model) if weights == "float8" else model
    settings = EngineSettings(
        seed=3, block_size=4, num_blocks=60, max_running=4, tokens_per_step=32, max_length=48, steps_per_sync=steps
    )
    if on_gpu or not as_gpu:
        return LocalEngine(model, settings)
    shape = {"num_layers": 2, "num_blocks": 60, "block_size": 4, "num_kv_heads": 2, "head_dim": 16}
    cache = PagedCache(**shape, dtype=dtype, device=device)
    limits = GraphLimits(max_rows=4, max_blocks=12, max_steps=steps)
    return LocalEngine(model, settings, runner=Runner(model, cache, device=device, graphs=limits, record=run_again))


def requests(temperature: float, **asked: Any) -> list[Request]:
    sizes = (3, 9, 9, 14, 5)
    prompts = [tuple(2 + (7 * i + 3 * j) % 50 for j in range(size)) for i, size in enumerate(sizes)]
    prompts[2] = prompts[1]
    return [
        Request(
            id=f"r{i}",
            prompt_ids=prompt,
            params=SamplingParams(temperature=temperature, max_new_tokens=5 + i, stop_ids=(1,), **asked),
        )
        for i, prompt in enumerate(prompts)
    ]


def generate(engine: LocalEngine, asked: list[Request]) -> list[Completion]:
    async def run() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(request) for request in asked))

    return asyncio.run(run())


def test_steps_of_few_rows_draw_what_the_walk_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    states = DecodeStep.states

    def counting(self: DecodeStep, tokens_N: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(len(tokens_N))
        return states(self, tokens_N, *rest)

    monkeypatch.setattr(DecodeStep, "states", counting)
    stepped = generate(make_engine(as_gpu=True, steps=4, dtype=torch.bfloat16), requests(1.0))
    assert max(seen) == 4, "all that run together"
    monkeypatch.setattr(runner, "can_step", lambda model: False)
    walked = generate(make_engine(as_gpu=True, steps=4, dtype=torch.bfloat16), requests(1.0))
    assert [one.token_ids for one in stepped] == [one.token_ids for one in walked]
    for one, other in zip(stepped, walked, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=0.02)


HEAVY = pytest.mark.heavy
"""Seconds of Triton's interpreter each; a lighter case of the same test stays."""


def test_weights_in_four_bits_are_made_inside_recorded_steps() -> None:
    single, recorded = (make_engine(as_gpu=as_gpu, steps=4, weights="4bit") for as_gpu in (False, True))
    expected, actual = generate(single, requests(1.0)), generate(recorded, requests(1.0))
    assert [one.token_ids for one in expected] == [other.token_ids for other in actual]
    in_full = generate(make_engine(as_gpu=False), requests(1.0))
    assert [one.token_ids for one in expected] != [other.token_ids for other in in_full]


@pytest.mark.parametrize("numerics", ["fast", pytest.param("exact", marks=HEAVY)])
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=HEAVY), 1.0])
def test_recorded_steps_draw_what_single_steps_on_a_cpu_draw(temperature: float, numerics: str) -> None:
    single, recorded = (
        make_engine(as_gpu=False, numerics=numerics),
        make_engine(as_gpu=True, numerics=numerics, steps=4),
    )
    expected, actual = generate(single, requests(temperature)), generate(recorded, requests(temperature))
    assert recorded.stats()["steps"] < single.stats()["steps"]  # several tokens between two looks
    for one, other in zip(expected, actual, strict=True):
        assert one.token_ids == other.token_ids
        assert one.finish == other.finish
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=1e-4, atol=1e-4)


@pytest.mark.heavy
def test_recorded_steps_of_float8_matrices_follow_a_publication() -> None:
    single, recorded = (make_engine(as_gpu=as_gpu, steps=4, weights="float8") for as_gpu in (False, True))
    before = generate(recorded, requests(1.0))
    torch.manual_seed(1)
    tensors = {
        name: (torch.randn(tensor.shape) * 0.3).to(tensor.device) if tensor.element_size() == 1 else tensor.detach()
        for name, tensor in saved_tensors(recorded._model).items()
    }
    for engine in (single, recorded):
        asyncio.run(engine.load(Publication(version=1, tensors=tensors)))
    expected, actual = generate(single, requests(1.0)), generate(recorded, requests(1.0))
    assert [one.token_ids for one in actual] != [one.token_ids for one in before]
    for one, other in zip(expected, actual, strict=True):
        assert one.token_ids[0] == other.token_ids[0]
        torch.testing.assert_close(
            torch.tensor(one.logprobs[:1]), torch.tensor(other.logprobs[:1]), rtol=0.02, atol=0.02
        )


@pytest.mark.heavy
def test_rows_that_want_more_than_tokens_are_drawn_from_the_recorded_states() -> None:
    expected = generate(make_engine(as_gpu=False), requests(1.0, top_logprobs=3, top_k=5))
    actual = generate(make_engine(as_gpu=True, steps=4), requests(1.0, top_logprobs=3, top_k=5))
    assert [one.token_ids for one in expected] == [other.token_ids for other in actual]
    assert [one.top_ids for one in expected] == [other.top_ids for other in actual]
    assert [one.keep_ids for one in expected] == [other.keep_ids for other in actual]


@HEAVY
def test_in_exact_mode_log_probabilities_do_not_depend_on_how_many_steps_or_rows_run_together() -> None:
    together = generate(make_engine(as_gpu=True, numerics="exact", steps=4), requests(1.0))
    alone = [generate(make_engine(as_gpu=True, numerics="exact"), [request])[0] for request in requests(1.0)[:3]]
    for one, other in zip(alone, together, strict=False):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs


def waves(seed: int) -> list[Request]:
    """Prompts of the same lengths, whose tokens differ from wave to wave."""
    return [
        Request(id=f"w{seed}/{i}", prompt_ids=tuple(2 + (seed + 7 * i + 3 * j) % 50 for j in range(size)),
                params=SamplingParams(max_new_tokens=3))
        for i, size in enumerate((5, 3, 8 - seed % 3))
    ]  # fmt: skip


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_recorded_prefills_compute_what_others_compute(numerics: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a larger pass went before, whose tokens and rows still lie in the tensors."""
    replays = 0

    def counted(work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        replay, output = run_again(work)

        def run() -> None:
            nonlocal replays
            replays += 1
            replay()

        return run, output

    single, recorded = make_engine(as_gpu=False, numerics=numerics), make_engine(as_gpu=True, numerics=numerics)
    graphs = recorded._runner._chunk_graphs
    assert graphs is not None
    if not torch.cuda.is_available():
        graphs._record = counted
    for seed in range(5):
        asked = waves(seed)[: 3 if seed != 3 else 1]
        for one, other in zip(generate(single, asked), generate(recorded, asked), strict=True):
            assert one.token_ids == other.token_ids
            torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=1e-4, atol=1e-4)
    assert torch.cuda.is_available() or replays >= 3


def test_a_prefill_has_the_same_bits_before_and_after_it_is_recorded() -> None:
    """A resumed run counts its passes anew."""
    engines = [make_engine(as_gpu=True) for _ in range(2)]
    for seed in (4, 5):
        generate(engines[0], waves(seed))
    recorded, fresh = (generate(engine, waves(10)) for engine in engines)
    assert engines[0]._runner._chunk_graphs._recorded
    assert not engines[1]._runner._chunk_graphs._recorded
    assert [one.logprobs for one in recorded] == [one.logprobs for one in fresh]


@pytest.mark.parametrize(("count", "size"), [(1, 1), (3, 4), (200, 256), (257, 384), (1000, 1024)])
def test_sizes_are_few_and_close(count: int, size: int) -> None:
    assert bucket(count) == size


def test_prefills_of_every_size_need_few_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "LEAST", LEAST)
    sizes = {
        chunks._rounded(chunks.Size(rows * length, rows, length), most_rows=12)
        for rows in (1, 2, 3, 5, 7, 12)
        for length in (1, 9, 100, 130, 255, 300)
    }
    assert len(sizes) <= 12
    assert max(size.rows for size in sizes) == 12, "no more than the tensors of a recording have"


@pytest.mark.parametrize("as_gpu", [False, True], ids=["cpu", "recorded"])
@pytest.mark.parametrize(
    "asked", mostly_slow([{}, {"top_k": 5}, {"top_p": 0.9}, {"top_logprobs": 2}], keep=({}, {"top_k": 5})), ids=str
)
@pytest.mark.parametrize("temperature", mostly_slow([0.0, 1.0], keep=(1.0,)))
def test_logits_that_are_nan_stop_the_engine_and_name_the_weights(
    temperature: float, asked: dict[str, Any], as_gpu: bool
) -> None:
    engine = make_engine(as_gpu=as_gpu, steps=4)
    engine._model.model.layers[1].mlp.down_proj.weight.data[3, 5] = torch.nan
    with pytest.raises(BackendError, match=r"log-probability NaN .* weights model.layers.1.mlp.down_proj.weight are"):
        generate(engine, requests(temperature, **asked))


@pytest.mark.parametrize("as_gpu", [False, True], ids=["cpu", "recorded"])
def test_nan_in_the_midst_of_a_burst_is_seen_when_the_host_looks(as_gpu: bool) -> None:
    """Token 60 is in no prompt, and some row draws it in some step of a burst."""
    engine = make_engine(as_gpu=as_gpu, steps=4)
    engine._model.model.embed_tokens.weight.data[60] = torch.nan
    params = SamplingParams(max_new_tokens=24, temperature=2.0)
    asked = [Request(id=f"n{n}", prompt_ids=(n, 5, 9), params=params) for n in range(2, 6)]
    with pytest.raises(BackendError, match=r"log-probability NaN .* model.embed_tokens.weight are not finite"):
        generate(engine, asked)


def test_weights_that_are_finite_and_overflow_are_told_by_their_layer() -> None:
    engine = make_engine(as_gpu=False)
    engine._model.model.layers[0].mlp.down_proj.weight.data *= 1e38
    with pytest.raises(BackendError, match="weights are finite, and float32 overflows before the attention of layer 1"):
        generate(engine, requests(1.0))
