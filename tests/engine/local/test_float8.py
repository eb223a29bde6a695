"""An engine whose matrices are float8: it draws close to the model, follows publications, is compared by its bits."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from temper.batching.pack import pack
from temper.engine.digests import differing, digested
from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.models.decoder import _project
from temper.models.float8.arithmetic import FLOAT8
from temper.models.float8.layers import float8_copy, float8_layers, float8_names, held_bits, published_bits
from temper.models.load import prepare
from temper.models.ops import ops_of
from temper.objectives import PRESETS
from temper.parity.budgets import DepthAndWidth, budget_of
from temper.parity.check import Canary, Sides, stale_tensors
from temper.trainer.local import LocalTrainer, TrainerSettings
from temper.trainer.optim import OptimizerSettings
from temper.trainer.weights import publish
from temper.types import Completion, Request, SamplingParams

PROMPTS = [tuple(range(2 + k, 14 + k)) for k in range(4)]


def make_engine(model: Any) -> LocalEngine:
    settings = EngineSettings(seed=7, block_size=4, num_blocks=200, max_running=16, tokens_per_step=64, max_length=64)
    return LocalEngine(model, settings)


def draw(engine: LocalEngine, name: str) -> list[Completion]:
    async def go() -> list[Completion]:
        params = SamplingParams(max_new_tokens=8)
        requests = [Request(id=f"{name}/{k}", prompt_ids=p, params=params) for k, p in enumerate(PROMPTS)]
        return await asyncio.gather(*map(engine.generate, requests))

    return asyncio.run(go())


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make_model(family: str) -> Any:
    """Weights as transformers draws them: how float8 rounds what is far from any model is no measure."""
    torch.manual_seed(0)
    kind = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[family]
    config = kind(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, initializer_range=0.1,
    )  # fmt: skip
    return prepare(AutoModelForCausalLM.from_config(config).eval())


def test_matrices_of_layers_are_float8_and_everything_else_is_shared(family: str) -> None:
    model = make_model(family)
    quantized = float8_copy(model)
    layers = float8_layers(quantized)
    assert len(layers) == 7 * len(model.get_decoder().layers)
    assert all(layer.weight.dtype == FLOAT8 for layer in layers.values())
    ours, theirs = publish(model, 0).tensors, publish(quantized, 0).tensors
    assert ours.keys() == theirs.keys()
    assert all(ours[name].data_ptr() == theirs[name].data_ptr() for name in ours if name not in layers)
    assert not float8_layers(model), "the trainer's model is not touched"


def agreement_of(model: Any, quantized: Any, budget: Any) -> Any:
    settings = TrainerSettings(optimizer=OptimizerSettings(learning_rate=0.0), temperature=1.0, total_steps=1)
    trainer = LocalTrainer(model, None, PRESETS["grpo"], settings, pack=partial(pack, tokens_per_microbatch=512))
    sides = Sides(
        sampler=make_engine(quantized), recompute=trainer.score, params=SamplingParams(max_new_tokens=64), budget=budget
    )
    return asyncio.run(Canary(sides, PROMPTS, name="canary").check(0))


def test_the_gap_keeps_the_budget_of_fp8_and_not_that_of_the_model(family: str) -> None:
    model = make_model(family)
    size = DepthAndWidth(num_layers=len(model.get_decoder().layers), width=64)
    budget = budget_of(family, "fp8", "local", "fast", size)
    agreement = agreement_of(model, float8_copy(model), budget)
    assert agreement.mean_gap > budget_of(family, "float32", "local", "fast", size).mean_gap


def test_scales_of_other_channels_break_the_budget(family: str) -> None:
    model = make_model(family)
    quantized = float8_copy(model)
    for layer in float8_layers(quantized).values():
        layer.scale.copy_(layer.scale.mean() * torch.logspace(-2, 2, len(layer.scale)))
    size = DepthAndWidth(num_layers=len(model.get_decoder().layers), width=64)
    with pytest.raises(Exception, match="sampler and trainer disagree"):
        agreement_of(model, quantized, budget_of(family, "fp8", "local", "fast", size))


def test_a_publication_changes_what_is_drawn_in_the_memory_that_was_there() -> None:
    model = make_model("qwen2")
    quantized = float8_copy(model)
    engine = make_engine(quantized)
    before = draw(engine, "a")
    places = {name: layer.weight.data_ptr() for name, layer in float8_layers(quantized).items()}
    with torch.no_grad():
        for layer in model.get_decoder().layers:
            layer.mlp.down_proj.weight.mul_(-1)
    publication = publish(model, 1)
    assert stale_tensors(
        published_bits(publication.tensors, quantized), held_bits(quantized, publish(quantized, 0).tensors)
    )
    asyncio.run(engine.load(publication))
    held = held_bits(quantized, publish(quantized, 0).tensors)
    assert stale_tensors(published_bits(publication.tensors, quantized), held) == []
    assert places == {name: layer.weight.data_ptr() for name, layer in float8_layers(quantized).items()}
    after = draw(engine, "a")
    assert [one.logprobs for one in before] != [one.logprobs for one in after]
    fresh = draw(make_engine(float8_copy(model)), "a")
    assert [list(one.logprobs) for one in fresh] == [list(one.logprobs) for one in after]


def test_one_scale_that_differs_is_named() -> None:
    model = make_model("llama")
    quantized = float8_copy(model)
    layers = float8_layers(quantized)
    name = next(iter(layers))
    layers[name].scale[2] *= 1.01
    held = held_bits(quantized, publish(quantized, 0).tensors)
    assert stale_tensors(published_bits(publish(model, 0).tensors, quantized), held) == [
        name.replace("weight", "scale")
    ]


def test_what_an_engine_holds_in_float8_is_compared_with_what_was_published(family: str) -> None:
    model = make_model(family)
    quantized = float8_copy(model)
    assert float8_names(model) == float8_layers(quantized).keys()
    publication, digests = digested(publish(model, 1), float8_names(model))
    engine = make_engine(quantized)
    asyncio.run(engine.load(publication))
    assert differing(digests.read(), asyncio.run(engine.digests())) == []
    name, layer = next(iter(float8_layers(quantized).items()))
    layer.scale[2] *= 1.01
    assert differing(digests.read(), asyncio.run(engine.digests())) == [name]


def test_joined_products_equal_those_of_each_layer() -> None:
    model = float8_copy(make_model("qwen2"))
    attention = model.get_decoder().layers[0].self_attn  # type: ignore[operator, union-attr]
    hidden = torch.randn(3, attention.q_proj.weight.shape[1])
    linears = (attention.q_proj, attention.k_proj, attention.v_proj)
    apart = torch.cat([linear(hidden) for linear in linears], dim=-1)
    assert torch.allclose(_project(ops_of(torch.device("cpu"), "fast"), hidden, linears), apart, atol=1e-5)
