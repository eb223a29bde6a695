"""Budgets follow the size of a model, are found most specific first, and what they name is measured to keep them."""

from __future__ import annotations

import asyncio
import copy
import random
from functools import partial
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    Olmo2Config,
    OlmoeConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from temper.batching.pack import pack
from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.errors import UserError
from temper.models.load import prepare, shape_of
from temper.objectives import PRESETS
from temper.parity import budgets
from temper.parity.budgets import (
    ANY,
    EXACT,
    FAST,
    MARGIN,
    MEASURED_FAMILIES,
    Budget,
    DepthAndWidth,
    Rounding,
    budget_of,
)
from temper.parity.check import Canary, Sides
from temper.trainer.local import LocalTrainer, TrainerSettings
from temper.trainer.optim import OptimizerSettings
from temper.types import SamplingParams

SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2, "eos_token_id": 1,
    "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "gemma3_text": Gemma3TextConfig(
        **SHAPE, head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "olmo2": Olmo2Config(**SHAPE),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=16, moe_intermediate_size=48, decoder_sparse_step=1),
    "olmoe": OlmoeConfig(**SHAPE, **EXPERTS),
}


@pytest.mark.parametrize("family", MEASURED_FAMILIES)
def test_a_family_with_a_budget_of_its_own_keeps_it(family: str) -> None:
    torch.manual_seed(0)
    model = prepare(AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[family])).eval())
    assert shape_of(model.config).family == family
    settings = TrainerSettings(optimizer=OptimizerSettings(learning_rate=0.0), temperature=1.0, total_steps=1)
    trainer = LocalTrainer(model, None, PRESETS["grpo"], settings, pack=partial(pack, tokens_per_microbatch=64))
    engine = LocalEngine(
        model,
        EngineSettings(seed=1, block_size=4, num_blocks=200, max_running=4, tokens_per_step=16, max_length=128),
    )
    budget = budget_of(family, "float32", "local", "fast", DepthAndWidth(num_layers=2, width=64))
    sides = Sides(sampler=engine, recompute=trainer.score, params=SamplingParams(max_new_tokens=64), budget=budget)
    draw = random.Random(0)
    prompts = [tuple(draw.randrange(2, 97) for _ in range(size)) for size in (3, 40, 17, 30)]
    agreement = asyncio.run(Canary(sides, prompts, name="canary").check(0))
    assert agreement is not None
    assert agreement.mean_gap <= budget.mean_gap / 3, "a budget is a few times what is measured"


ONE_LAYER = DepthAndWidth(num_layers=1, width=64)


def test_the_most_specific_budget_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        ("llama", "bfloat16", "vllm"): Rounding(unit=1.0, tail=1),
        ("llama", "bfloat16", ANY): Rounding(unit=2.0, tail=1),
        (ANY, "bfloat16", "vllm"): Rounding(unit=3.0, tail=1),
        (ANY, "bfloat16", ANY): Rounding(unit=4.0, tail=1),
    }
    monkeypatch.setattr(budgets, "FAST", table)
    found = [
        budget_of(family, "bfloat16", engine, "fast", ONE_LAYER).mean_gap / MARGIN
        for family, engine in [("llama", "vllm"), ("llama", "local"), ("new", "vllm"), ("new", "local")]
    ]
    assert found == [1.0, 2.0, 3.0, 4.0]


def test_a_budget_grows_with_the_root_of_the_depth_and_with_widths_above_1024() -> None:
    def mean(num_layers: int, width: int) -> float:
        return Rounding(unit=0.5, tail=10).budget(DepthAndWidth(num_layers=num_layers, width=width)).mean_gap

    assert mean(1, 64) == mean(1, 1024) == 0.5 * MARGIN
    assert mean(9, 1024) == 3 * mean(1, 1024)
    assert mean(1, 3072) == 3 * mean(1, 1024)
    assert Rounding(unit=0.5, tail=10).budget(ONE_LAYER).max_gap == 10 * mean(1, 64)


SEEN_ON_A_GPU = [
    ("bfloat16", 28, 1536, 0.0188), ("bfloat16", 28, 3584, 0.0436), ("bfloat16", 28, 1536, 0.0164),
    ("bfloat16", 28, 3584, 0.0376), ("float16", 28, 1536, 0.00215), ("float16", 28, 3584, 0.00502),
    ("fp8", 28, 1536, 0.212), ("fp8", 28, 3584, 0.611),
]  # fmt: skip
"""(dtype, layers, width, mean gap): shapes of Qwen2.5-1.5B and 7B on an H200, random weights."""


@pytest.mark.parametrize(("dtype", "num_layers", "width", "gap"), SEEN_ON_A_GPU)
def test_honest_rounding_of_large_models_keeps_its_budget_with_room_and_not_with_much(
    dtype: str, num_layers: int, width: int, gap: float
) -> None:
    budget = budget_of("qwen2", dtype, "local", "fast", DepthAndWidth(num_layers=num_layers, width=width))
    assert 1.5 * gap <= budget.mean_gap <= 3 * gap


@pytest.mark.parametrize("temperature", [0.25, 0.7, 1.0, 2.0])
def test_errors_of_logits_grow_as_the_temperature_falls_and_so_does_the_budget(temperature: float) -> None:
    """Two sides whose logits differ by little, at every temperature that people draw with."""
    torch.manual_seed(0)
    logits, error = 0.5 * torch.randn(4000, 50, dtype=torch.float64), 1e-4 * torch.randn(4000, 50, dtype=torch.float64)
    sampled = (logits / temperature).log_softmax(-1)
    drawn = torch.multinomial(sampled.exp(), 1)
    gaps = (sampled - ((logits + error) / temperature).log_softmax(-1)).gather(1, drawn).abs()
    plain = Budget(mean_gap=1e-4, max_gap=1e-3)  # what such logits just keep at temperature 1
    assert gaps.mean() < plain.at(temperature).mean_gap
    assert gaps.max() < plain.at(temperature).max_gap
    if temperature == 0.7:
        assert gaps.mean() > plain.mean_gap, "the budget of temperature 1 would stop it"


def test_the_trained_model_that_was_stopped_at_temperature_0_7_keeps_it() -> None:
    """Qwen2.5-Coder-0.5B after 158 steps on GSM8K, on an H200: 0.0254 on average, and healthy."""
    budget = budget_of("qwen2", "bfloat16", "local", "fast", DepthAndWidth(num_layers=24, width=896))
    assert budget.mean_gap < 0.0254 < 0.8 * budget.at(0.7).mean_gap


def test_above_one_the_budget_stays() -> None:
    assert Budget(mean_gap=1.0, max_gap=2.0).at(3.0) == Budget(mean_gap=1.0, max_gap=2.0)
    assert Budget(mean_gap=1.0, max_gap=2.0).at(0.5) == Budget(mean_gap=2.0, max_gap=4.0)


def test_exact_mode_allows_nothing() -> None:
    for family, dtype, engine in [*FAST, ("unheard_of", "bfloat16", "sglang")]:
        assert budget_of(family, dtype, engine, "exact", ONE_LAYER) == EXACT == Budget(mean_gap=0.0, max_gap=0.0)


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"no budget .* in int8\. Use model\.dtype bfloat16, float16, float32, float64"):
        budget_of("llama", "int8", "local", "fast", ONE_LAYER)
