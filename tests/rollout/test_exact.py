"""In exact mode the trainer recomputes, to the bit, what the sampler reported: ratio 1, nothing clipped, KL 0."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Dots1Config,
    Glm4MoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SolarOpenConfig,
)

from temper.batching.pack import pack
from temper.batching.rows import rows_of
from temper.commands.training.train import train
from temper.config import resolve, to_toml
from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.errors import UserError
from temper.models.decoder import lay_end_to_end, set_numerics
from temper.models.load import load_model, prepare
from temper.runs.reader import RunReader
from temper.trainer.passes.forward import score_drawn
from temper.types import Completion, Message, Request, Sample, SamplingParams, Score, Status, Trajectory, Turn

SHAPE: dict[str, Any] = {
    "vocab_size": 301, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.15,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 8, "moe_intermediate_size": 48, "num_experts_per_tok": 3}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "mistral": MistralConfig(**SHAPE, sliding_window=24),  # shorter than the prompts and than some answers' way back
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=16, norm_topk_prob=True),
    "qwen2_moe": Qwen2MoeConfig(**SHAPE, **EXPERTS, shared_expert_intermediate_size=40),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=6),
    "olmoe": OlmoeConfig(**SHAPE, num_experts=8, num_experts_per_tok=3),
    "glm4_moe": Glm4MoeConfig(
        **SHAPE, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, n_group=3, topk_group=2
    ),
    "dots1": Dots1Config(
        **SHAPE,
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        n_shared_experts=1,
        first_k_dense_replace=1,
    ),
    "solar_open": SolarOpenConfig(
        **SHAPE, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=1, head_dim=16
    ),
}
ROOMY = {"block_size": 16, "num_blocks": 200, "max_running": 16, "tokens_per_step": 4096}
TIGHT = {"block_size": 4, "num_blocks": 30, "max_running": 3, "tokens_per_step": 16}


def make_model(family: str, numerics: Any, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[family])).to(dtype).eval()
    model = prepare(model)
    lay_end_to_end(model)
    set_numerics(model, numerics)
    return model


def sample(model: Any, size: dict[str, int], temperature: float, **asked: Any) -> list[Completion]:
    engine = LocalEngine(model, EngineSettings(seed=5, max_length=200, **size))
    prompts = [tuple((7 * i + 3 * j) % 299 for j in range(length)) for i, length in enumerate((3, 40, 17, 70, 9))]
    prompts += prompts[1:2] * 2
    params = SamplingParams(temperature=temperature, max_new_tokens=20, **asked)

    async def run() -> list[Completion]:
        requests = [Request(id=f"r{i}", prompt_ids=prompt, params=params) for i, prompt in enumerate(prompts)]
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    return asyncio.run(run())


def as_rows(completions: list[Completion]) -> list[Sample]:
    rows = []
    for index, completion in enumerate(completions):
        turn = Turn(completion=completion, message=Message(role="assistant", content=""))
        trajectory = Trajectory(
            task_id="t", group_id="g", index=index, turns=(turn,), status=Status.COMPLETED, score=Score.of(0.0)
        )
        rows += rows_of(trajectory)
    return rows


def differing(model: Any, rows: list[Sample], temperature: float, budget: int) -> int:
    """Drawn tokens whose log-probability the trainer computes otherwise."""
    wrong = 0
    for microbatch in pack(rows, tokens_per_microbatch=budget):
        mask = microbatch.loss_mask.bool()
        with torch.no_grad():
            again = score_drawn(model, microbatch, temperature).logprobs
        wrong += int((again != microbatch.behavior_logprobs[mask].to(again.dtype)).sum())
        graded = score_drawn(model, microbatch, temperature).logprobs
        wrong += int((graded.detach() != again).sum())
    return wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", CONFIGS)
def test_sampler_and_trainer_agree_to_the_bit_whatever_is_batched_together(family: str, dtype: torch.dtype) -> None:
    model = make_model(family, "exact", dtype)
    roomy, tight = (sample(model, size, 1.0) for size in (ROOMY, TIGHT))
    assert [c.token_ids for c in roomy] == [c.token_ids for c in tight]
    assert [c.logprobs for c in roomy] == [c.logprobs for c in tight]
    for budget in (60, 100_000):
        assert differing(model, as_rows(roomy), 1.0, budget) == 0


@pytest.mark.parametrize("asked", [{"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}], ids=str)
def test_they_agree_within_keep_sets_and_at_other_temperatures(asked: dict[str, float]) -> None:
    model = make_model("llama", "exact")
    assert differing(model, as_rows(sample(model, TIGHT, 0.7, **asked)), 0.7, 100_000) == 0


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_fast_mode_would_be_noticed(family: str) -> None:
    model = make_model(family, "fast")
    assert differing(model, as_rows(sample(model, TIGHT, 1.0)), 1.0, 100_000) > 0


def test_a_run_in_exact_mode_is_on_policy_to_the_bit_and_learns_like_any_other(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    tiny_recipe["engine"] = {"numerics": "exact"}
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(resolve(tiny_recipe, [], where="tiny")))
    train(recipe, run=tmp_path / "run")
    with RunReader(tmp_path / "run") as reader:
        steps = [reader.metrics_at(1, step.step) for step in reader.steps() if step.stage == 1]
    assert steps
    for metrics in steps:
        assert metrics["mismatch/logp_abs_max"] == 0.0
        assert metrics["policy/ratio_mean"] == metrics["policy/ratio_max"] == 1.0
        assert metrics["policy/clip_frac_high"] == metrics["policy/clip_frac_low"] == 0.0


def test_a_family_without_exact_arithmetic_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import Olmo2Config

    config = Olmo2Config(**{**SHAPE, "num_hidden_layers": 1})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="olmo2"):
        load_model(tmp_path, torch.float32, torch.device("cpu"), "exact")
