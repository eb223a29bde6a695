"""Models by their shape: configurations that benchmarks make random weights for, by name or read from a directory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from transformers import AutoConfig

_TINY = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 4096, "tie_word_embeddings": True}  # fmt: skip
_SMOLLM2_135M = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
                 "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True}  # fmt: skip
_QWEN_0_5B = {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
              "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}  # fmt: skip
_QWEN_1_5B = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
              "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}  # fmt: skip
_QWEN_7B = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
            "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False}  # fmt: skip
_QWEN_30B_A3B = {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
                 "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128,
                 "num_key_value_heads": 4, "vocab_size": 151936, "tie_word_embeddings": False}  # fmt: skip

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("llama", _TINY),
    "smollm2-135m": ("llama", _SMOLLM2_135M),
    "qwen2.5-0.5b": ("qwen2", _QWEN_0_5B),
    "qwen2.5-1.5b": ("qwen2", _QWEN_1_5B),
    "qwen2.5-7b": ("qwen2", _QWEN_7B),
    "qwen3-30b-a3b": ("qwen3_moe", _QWEN_30B_A3B),
    "qwen3-30b-a3b-6-layers": ("qwen3_moe", {**_QWEN_30B_A3B, "num_hidden_layers": 6}),
    "qwen3-30b-a3b-1-layer": ("qwen3_moe", {**_QWEN_30B_A3B, "num_hidden_layers": 1}),
    "tiny-experts": ("qwen3_moe", {**_TINY, "head_dim": 32, "moe_intermediate_size": 96, "num_experts": 8,
                                   "num_experts_per_tok": 2}),
}  # fmt: skip
"""(model_type, configuration)."""


SHAPE_HELP = f"{', '.join(SHAPES)}, or a directory with config.json; weights are random"


def shape_of(text: str) -> str:
    """What --shape takes: one of the names, or a directory with a config.json, of which no weights are read."""
    if text in SHAPES or (Path(text) / "config.json").is_file():
        return text
    why = "has no config.json" if Path(text).is_dir() else "is neither a shape nor a directory"
    raise argparse.ArgumentTypeError(f"{text} {why}. Use one of {', '.join(SHAPES)}, or a directory with config.json")


def configuration(shape: str, context: int = 2048, **more: Any) -> Any:
    """context: tokens of the longest row."""
    if shape not in SHAPES:
        found = AutoConfig.from_pretrained(shape, trust_remote_code=False)
        found.update({"max_position_embeddings": context, **more})
        return found
    family, numbers = SHAPES[shape]
    return AutoConfig.for_model(family, **{**numbers, "max_position_embeddings": context, **more})
