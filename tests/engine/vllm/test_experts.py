"""vLLM draws with experts that were published: it looks for them one by one, and holds them in stacks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from temper.engine.manifest import differences, manifest_of
from temper.engine.vllm.engine import VllmEngine
from tests.engine.vllm.test_engine import VOCABULARY, Live, gap, needs_vllm, publication, request, settings

SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512, "initializer_range": 0.2,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONFIGURATIONS = {
    "qwen3_moe": lambda: Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=32, norm_topk_prob=True),
    "mixtral": lambda: MixtralConfig(**SHAPE, num_local_experts=8),
    "qwen2_moe": lambda: Qwen2MoeConfig(**SHAPE, **EXPERTS, shared_expert_intermediate_size=32),
    "olmoe": lambda: OlmoeConfig(**{**SHAPE, "num_key_value_heads": 2}, num_experts=8, num_experts_per_tok=2),
}


def make(family: str, seed: int) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIGURATIONS[family](), trust_remote_code=False).eval()


@needs_vllm
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] if name != "qwen3_moe" else []) for name in CONFIGURATIONS]
)
def test_published_experts_are_the_ones_that_draw(family: str, tmp_path: Path) -> None:
    old, new = make(family, 0), make(family, 1)
    old.save_pretrained(tmp_path)
    with asyncio.Runner() as runner:
        live = Live(VllmEngine(settings(tmp_path)), runner, old)
        try:
            runner.run(live.engine.start())
            for model, other in ((old, new), (new, old)):
                live.publish(model)
                (drawn,) = live.draw(request(f"{live.engine.version}", max_new_tokens=24))
                assert gap(model, drawn) < 1e-4
                assert gap(other, drawn) > 0.1, "the other experts would be noticed"
            manifest = manifest_of(publication(new, 1))
            assert differences(manifest, live.run(live.engine.held(manifest))) == []
            block = "block_sparse_moe" if family == "mixtral" else "mlp"
            spoiled = f"model.layers.1.{block}.experts.routed_experts.w2_weight"
            live.run(live.engine._engine.collective_rpc("temper_scramble", args=(spoiled,)))
            found = differences(manifest, live.run(live.engine.held(manifest)))
            assert found == ["model.layers.1.mlp.experts.down_proj holds other numbers"]
        finally:
            runner.run(live.engine.close())
