"""What every sampler counts, against the one reader of it: no engine may end a run by what it does not count."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.engine.none import NoSampler
from temper.engine.sglang.checkpoints import Checkpoints
from temper.engine.sglang.engine import SglangEngine, SglangSettings
from temper.engine.vllm.engine import VllmEngine, VllmSettings
from temper.runs.metrics import describe
from temper.runs.time_split import time_metrics
from temper.types import Publication, Request, SamplingParams
from tests.fakes.sampler import FakeSampler

REQUEST = Request(id="r", prompt_ids=(5, 9, 33, 2), params=SamplingParams(max_new_tokens=8))
Stats = Mapping[str, float]


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=96, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    )


async def local(_: Any, __: Path) -> list[Stats]:
    engine = LocalEngine(
        tiny_model(),
        EngineSettings(seed=0, block_size=16, num_blocks=16, max_running=2, tokens_per_step=16, max_length=64),
    )
    idle = engine.stats()
    await engine.generate(REQUEST)
    drawn = engine.stats()
    await engine.close()
    return [idle, drawn]


async def fake(_: Any, __: Path) -> list[Stats]:
    sampler = FakeSampler(lambda _: [3, 1])
    idle = sampler.stats()
    await sampler.generate(REQUEST)
    return [idle, sampler.stats()]


async def none(_: Any, __: Path) -> list[Stats]:
    return [NoSampler().stats()]


async def sglang_server(world: Any, _: Path) -> list[Stats]:
    async with world.Server(world.checkpoint) as server:
        checkpoints = Checkpoints(like=world.checkpoint, folder=world.weights_folder)
        engine = SglangEngine(server.address, SglangSettings(), checkpoints)
        idle = engine.stats()
        await engine.load(Publication(version=1, tensors=world.tensors(1)))
        await engine.generate(REQUEST)
        drawn = engine.stats()
        await engine.close()
    return [idle, drawn]


async def vllm(_: Any, folder: Path) -> list[Stats]:
    """Its class, told of one step by a stub of what vLLM passes to its loggers."""
    tiny_model().save_pretrained(folder)
    sizes = {"max_running": 2, "tokens_per_step": 16, "max_length": 64, "kv_tokens": 256}
    engine = VllmEngine(VllmSettings(folder=folder, seed=0, dtype="float32", device="cpu", **sizes))
    idle = engine.stats()
    found = SimpleNamespace(hits=4)
    scheduler = SimpleNamespace(kv_cache_usage=0.5, num_running_reqs=2, num_waiting_reqs=1, prefix_cache_stats=found)
    step = SimpleNamespace(
        prompt_token_stats=SimpleNamespace(computed=12), num_generation_tokens=8, num_preempted_reqs=1
    )
    engine._monitor.record(scheduler, step)
    return [idle, engine.stats()]


@pytest.mark.parametrize("engine", [local, fake, none, sglang_server, vllm])
def test_what_any_sampler_counts_can_be_read(engine: Callable[[Any, Path], Any], sglang: Any, tmp_path: Path) -> None:
    for stats in asyncio.run(asyncio.wait_for(engine(sglang, tmp_path), 60)):
        assert all(math.isfinite(value) for value in stats.values())
        metrics = time_metrics({"rollout": 1.0, "publish": 0.5}, stats)
        assert all(describe(name) is not None and math.isfinite(value) for name, value in metrics.items())
        for name in ("kv_use", "preemptions", "prefix_hit_rate"):
            assert metrics.get(f"sys/{name}") == stats.get(name), "shown as counted, or left out"
        if engine in (local, sglang_server, vllm):
            assert 0 <= metrics["sys/sampler_idle"] <= 1, "every engine that draws says for how long"


def test_no_single_count_is_needed() -> None:
    """Whatever one name a sampler leaves out, the rest is still read."""
    names = ("kv_use", "preemptions", "prefill_tokens", "decode_tokens", "running", "waiting", "occupancy",
             "prefix_hit_rate", "prefill_tok_s", "decode_tok_s", "drawing_seconds")  # fmt: skip
    full = dict.fromkeys(names, 0.5)
    for missing in names:
        time_metrics({"rollout": 1.0}, {name: value for name, value in full.items() if name != missing})
    assert time_metrics({"rollout": 1.0}, {}) == {"sys/step_time": 1.0, "sys/trainer_idle": 1.0}


def test_shares_of_prompts_found_in_a_cache_are_told_by_servers_too(sglang: Any, tmp_path: Path) -> None:
    assert asyncio.run(vllm(None, tmp_path))[1]["prefix_hit_rate"] == 4 / 16
    assert 0 < asyncio.run(sglang_server(sglang, tmp_path))[1]["prefix_hit_rate"] < 1
