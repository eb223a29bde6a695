"""A model that is computed wrongly is found out by comparing it with itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    DiffLlamaConfig,
    GPTJConfig,
    LlamaConfig,
    MistralConfig,
    PhimoeConfig,
    Qwen3NextConfig,
)

from temper.errors import UserError
from temper.models import proof
from temper.models.load import prepare
from temper.models.proof import gap_to_own_pass, require_proven, silent_layers

SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WRONG: dict[str, Callable[[], Any]] = {
    "linear attention": lambda: Qwen3NextConfig(
        **SMALL, head_dim=8, num_experts=4, moe_intermediate_size=16, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"],
    ),
    "state space": lambda: BambaConfig(**SMALL, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1),
    "two attentions": lambda: DiffLlamaConfig(**SMALL),
    "attention of its own": lambda: GPTJConfig(vocab_size=61, n_embd=32, n_layer=2, n_head=4, rotary_dim=8),
    "a window in the mask": lambda: PhimoeConfig(**SMALL, num_local_experts=4, sliding_window=8),
}  # fmt: skip


def model_of(config: Any, dtype: torch.dtype = torch.float32, name: str = "not_tried") -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    model.config.model_type = name
    return prepare(model.to(dtype).eval())


@pytest.mark.parametrize("kind", WRONG)
def test_a_family_that_temper_computes_wrongly_is_found_out_at_load(kind: str) -> None:
    with pytest.raises(UserError, match="models/some is a not_tried, a family that was not tried, and Temper's pass"):
        require_proven(model_of(WRONG[kind]()), "models/some")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", [LlamaConfig(**SMALL), MistralConfig(**SMALL, sliding_window=8)], ids=["llama", "w"])
def test_a_model_that_is_computed_rightly_proves_itself(config: Any, dtype: torch.dtype) -> None:
    model = model_of(config, dtype)
    require_proven(model, "models/some")
    assert gap_to_own_pass(model) < (1e-5 if dtype == torch.float32 else 0.1)
    assert silent_layers(model) == []


def test_rows_reach_beyond_the_window_of_a_family_that_was_not_tried() -> None:
    """Planted: a window of 48 tokens that attention forgets. Rows of 40 tokens would agree."""
    model = model_of(MistralConfig(**{**SMALL, "max_position_embeddings": 256}, sliding_window=48))
    model.config.sliding_window = 48
    attend = proof._attend

    def forgetful(*args: Any) -> Tensor:
        return attend(*args[:-1], None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "_attend", forgetful)
        assert gap_to_own_pass(model) < 1e-5
        with pytest.raises(UserError, match="differs from its own"):
            require_proven(model, "models/some")


def test_a_window_too_long_to_be_tried_is_refused() -> None:
    model = model_of(MistralConfig(**{**SMALL, "max_position_embeddings": 32768}, sliding_window=16384))
    with pytest.raises(UserError, match="window of 16384 tokens is too long to be tried"):
        require_proven(model, "models/some")


@pytest.mark.parametrize("fault", ["a prefix of another row", "rows beside each other", "earlier chunks"])
def test_what_only_a_cache_or_a_neighbour_spoils_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted, each in one of the ways that rows are computed."""
    model = model_of(LlamaConfig(**SMALL))
    extend, fork = proof.KeptRows._extend, proof.KeptRows.fork

    def spoiled_extend(self: Any, layer: int, row: int, first: int, key: Tensor, value: Tensor) -> Any:
        if fault == "rows beside each other" and row == 1 and not first:
            key = key.roll(1, 0)
        keys, values = extend(self, layer, row, first, key, value)
        return (keys, values.roll(1, 0)) if fault == "earlier chunks" and first > 20 else (keys, values)

    def spoiled_fork(self: Any, source: int, target: int, length: int) -> None:
        fork(self, source + (fault == "a prefix of another row"), target, length)

    monkeypatch.setattr(proof.KeptRows, "_extend", spoiled_extend)
    monkeypatch.setattr(proof.KeptRows, "fork", spoiled_fork)
    assert gap_to_own_pass(model) > 1e-3
