"""Random models of a few thousand parameters, one per family: tests of the trainer and of parity share them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma3TextConfig,
    Glm4MoeConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from temper.models.load import prepare

FAMILIES = ("llama", "qwen3", "gemma3", "olmo2")
SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
CONFIGS = {
    "mixtral": lambda: MixtralConfig(**SMALL, num_local_experts=8),
    "qwen2_moe": lambda: Qwen2MoeConfig(**SMALL, **EXPERTS, shared_expert_intermediate_size=16),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SMALL, **EXPERTS, norm_topk_prob=True),
    "glm4_moe": lambda: Glm4MoeConfig(
        **SMALL,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        first_k_dense_replace=0,
        num_mtp_layers=0,
    ),
    "llama": lambda: LlamaConfig(**SMALL, tie_word_embeddings=False),
    "tied_llama": lambda: LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SMALL),
    "qwen3": lambda: Qwen3Config(**SMALL),
    "olmo2": lambda: Olmo2Config(**{key: value for key, value in SMALL.items() if key != "head_dim"}),
    "gemma3": lambda: Gemma3TextConfig(
        **SMALL, sliding_window=3, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=8
    ),
}


def make_family_model(
    family: str = "llama", dtype: torch.dtype = torch.float64, seed: int = 0, is_plain: bool = False
) -> Any:
    """`is_plain`: with transformers' own attention instead of Temper's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation="sdpa")
        for parameter in model.parameters():  # larger than transformers' 0.02: rows must matter to each other
            torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    model = model.to(dtype)
    return model.eval() if is_plain else prepare(model)
