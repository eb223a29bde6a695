"""Workloads of benchmarks/step.py, which peaks were measured with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from temper.config.memory import MemoryChoice
from temper.planning.shape import DecoderShape, decoder_shape
from temper.planning.workload import Workload

SIZES = {
    "135m": ("llama", 576, 1536, 30, 9, 3, 49152, True),
    "1.5b": ("qwen2", 1536, 8960, 28, 12, 2, 151936, True),
    "7b": ("qwen2", 3584, 18944, 28, 28, 4, 152064, False),
}
KEYS = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "vocab_size", "tie_word_embeddings")  # fmt: skip
PROMPT = 50
MakeWorkload = Callable[..., Workload]


def shape_of_size(size: str) -> DecoderShape:
    return decoder_shape(dict(zip(KEYS, SIZES[size], strict=True)))


@pytest.fixture(scope="session")
def make_workload() -> MakeWorkload:
    def make(
        size: str,
        new: int = 512,
        microbatch: int = 16384,
        states: Any = "float32",
        *,
        recomputes: bool = False,
        **more: Any,
    ) -> Workload:
        """32 prompts x 8 answers."""
        rows = 256
        choice = MemoryChoice(
            tokens_per_microbatch=microbatch,
            kv_tokens=rows * (PROMPT + new) * 5 // 4,
            gradient_checkpointing=recomputes,
            states=states,
        )
        return Workload(
            shape=shape_of_size(size), choice=choice, prompt_tokens=PROMPT, completion_tokens=new, group_size=8,
            rows_per_update=rows, max_running=rows, **more,
        )  # fmt: skip

    return make


EXPERTS = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128,
    "num_key_value_heads": 4, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
"""Qwen3-30B-A3B."""
