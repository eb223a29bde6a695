"""A model is taken apart by its config.json as transformers would build it, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from temper.errors import UserError
from temper.models.load import shape_of
from temper.models.lora.targets import weights_to_adapt
from temper.planning.shape import DecoderShape, decoder_shape, read_decoder_shape
from temper.trainer.passes.work import size_of
from tests.planning.conftest import EXPERTS

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
CHOSEN: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GROUPED: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 14,
}  # fmt: skip
ERNIE: dict[str, Any] = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "head_dim": 16}
MORE: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"tie_word_embeddings": False, "sliding_window": 16},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**CHOSEN, "head_dim": 16},
    "qwen3_moe, one layer dense": {**CHOSEN, "head_dim": 16, "mlp_only_layers": [1]},
    "qwen3_moe, every second layer": {**CHOSEN, "head_dim": 16, "decoder_sparse_step": 2},
    "qwen2_moe": {**CHOSEN, "shared_expert_intermediate_size": 40},
    "qwen2_moe, one layer dense": {**CHOSEN, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {**GROUPED, "head_dim": 16, "use_qk_norm": True},
    "deepseek_v3": {**GROUPED, **LATENT},
    "deepseek_v3, two dense and two shared": {**GROUPED, **LATENT, "first_k_dense_replace": 2, "n_shared_experts": 2},
    "deepseek_v3, shared as wide as dense": {**GROUPED, **LATENT, "n_shared_experts": 4, "q_lora_rank": None},
    "deepseek_v2": {**GROUPED, **LATENT},
    "glm4_moe_lite": {**GROUPED, **LATENT},
    "axk1": {**GROUPED, **LATENT},
    "dots1": GROUPED,
    "exaone_moe": {**CHOSEN, "head_dim": 16},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "hy_v3": {**CHOSEN, "head_dim": 16},
    "mellum": {**CHOSEN, "head_dim": 16},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "solar_open": {**GROUPED, "head_dim": 16, "first_k_dense_replace": 0},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 40},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 2},
    "afmoe": {**CHOSEN, "head_dim": 16, "num_dense_layers": 1, "num_shared_experts": 2},
    "ernie4_5_moe": ERNIE,
    "ernie4_5_moe, the last dense": {**ERNIE, "moe_layer_start_index": 0, "moe_layer_end_index": 1},
    "ernie4_5_moe, every second": {**ERNIE, "moe_layer_start_index": 0, "moe_layer_interval": 2},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 16},
    "hunyuan_v1_moe, a number for every layer": {"num_experts": 4, "moe_topk": [1, 2, 3], "head_dim": 16},
    "laguna": {**CHOSEN, "head_dim": 16, "shared_expert_intermediate_size": 40},
    "laguna, a gate for every number": {
        **CHOSEN, "head_dim": 16, "shared_expert_intermediate_size": 40, "gating": "per-element"
    },
    "longcat_flash": {
        **LATENT, "num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 24,
        "n_routed_experts": 4, "zero_expert_num": 4, "moe_topk": 2,
    },
    "arcee": {},
    "exaone4": {},
    "gemma3_text": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
}  # fmt: skip


def made(name: str, folder: Path) -> tuple[Any, DecoderShape]:
    """The family's own model, without numbers, and what is read of its config.json."""
    config = AutoConfig.for_model(name.split(",")[0], **{**SIZES, **MORE[name]})
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return model, read_decoder_shape(folder)


@pytest.mark.parametrize("name", MORE)
def test_parameters_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    model, shape = made(name, tmp_path)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    engine = shape_of(model.config)
    assert (shape.num_kv_heads, shape.head_dim) == (engine.num_kv_heads, engine.head_dim), "what the cache is made of"
    assert shape.is_tied == bool(model.config.tie_word_embeddings)


@pytest.mark.parametrize("name", MORE)
def test_flops_of_a_token_are_those_that_the_trainer_counts(name: str, tmp_path: Path) -> None:
    """Of experts those that work on it, and all that every token meets: routers, shared experts, dense layers."""
    model, shape = made(name, tmp_path)
    counted = size_of(model)
    assert shape.active_layers == counted.trained
    assert shape.query_width == counted.attention_width


@pytest.mark.parametrize("name", MORE)
def test_adapters_are_as_large_as_those_that_are_put_on(name: str, tmp_path: Path) -> None:
    """Without names of targets: on attention, dense and shared feed-forward parts, and on no expert that is chosen."""
    model, shape = made(name, tmp_path)
    sizes = dict(model.named_parameters())
    assert shape.adapter_parameters(8) == 8 * sum(sum(sizes[weight].shape) for weight in weights_to_adapt(model, ()))


@pytest.mark.parametrize(
    "family",
    ["apertus", "bitnet", "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "hyperclovax", "jais2", "nanochat", "olmo", "opt",
     "phi", "phi3", "starcoder2"],
)  # fmt: skip
def test_families_of_another_kind_are_estimated_to_two_percent(family: str) -> None:
    """At the sizes of their own defaults: without biases, positions, and what only they have."""
    config = AutoConfig.for_model(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    real = sum(parameter.numel() for parameter in model.parameters())
    assert decoder_shape(config.to_dict()).parameters == pytest.approx(real, rel=0.02)
    size_of(model)


def test_more_experts_in_some_layers_are_planned_as_the_mean_and_up() -> None:
    """Of 1, 2 and 2 experts by layer the trainer counts 5/3, and the plan 2."""
    config = AutoConfig.for_model("hunyuan_v1_moe", **SIZES, num_experts=4, moe_topk=[1, 2, 2], head_dim=16)
    with torch.device("meta"):
        counted = size_of(AutoModelForCausalLM.from_config(config)).trained
    shape = decoder_shape(config.to_dict())
    assert shape.experts_per_token == 2
    assert shape.active_layers - counted == pytest.approx(3 * shape.experts / 4 * (2 - 5 / 3))


def test_seven_billion_by_hand() -> None:
    """28 layers of attention 2 x 3584 x (3584 + 512) and 3 x 3584 x 18944; embedding and head of 152064 x 3584; norms
    and biases."""
    shape = decoder_shape({
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    })  # fmt: skip
    assert shape.parameters == 7_615_616_512
    assert shape.adapter_parameters(32) == 28 * 32 * (2 * 7168 + 2 * 4096 + 3 * 22528)
    assert shape.adapter_parameters(32, ("q_proj", "v_proj")) == 28 * 32 * (7168 + 4096)


def test_experts_work_by_turns() -> None:
    shape = decoder_shape({**SIZES, "model_type": "mixtral", **MORE["mixtral"]})
    assert shape.active_mlp == 2 * 3 * 64 * 96 + 4 * 64, "the router works on every token"
    assert shape.mlp == 4 * 3 * 64 * 96 + 4 * 64
    query, attention = 64 + shape.query_width, 4 * 64 + 2 * shape.query_width + 2 * shape.kv_width
    assert shape.adapter_parameters(8) == shape.num_layers * 8 * attention, "experts are named or left alone"
    experts = 4 * ((64 + 2 * 96) + (96 + 64))
    assert shape.adapter_parameters(8, ("q_proj", "experts")) == shape.num_layers * 8 * (query + experts)


def test_thirty_billion_with_three_active_by_hand() -> None:
    """48 layers of attention 2 x 2048 x (4096 + 512) and 128 experts of 3 x 2048 x 768 with a router, 8 for a token."""
    shape = decoder_shape(EXPERTS)
    assert shape.layers == 48 * (2 * 2048 * 4608 + 128 * 3 * 2048 * 768 + 2048 * 128)
    assert shape.active_layers == 48 * (2 * 2048 * 4608 + 8 * 3 * 2048 * 768 + 2048 * 128)
    assert 30.5e9 < shape.parameters < 30.6e9
    assert 2.7e9 < shape.active_layers < 2.8e9


def test_many_tokens_need_nearly_all_experts_between_them() -> None:
    """One token needs 8 of 128, two needs twice that but for those they share."""
    shape = decoder_shape(EXPERTS)
    always = 48 * (shape.attention + shape.common_mlp)
    of_experts = [(shape.read_layers(n) - always) / (48 * shape.experts) for n in (1, 2, 256)]
    assert of_experts[:2] == pytest.approx([8 / 128, 1 - (120 / 128) ** 2])
    assert of_experts[2] == pytest.approx(1.0, abs=1e-6)
    dense = decoder_shape({**SIZES, "model_type": "llama"})
    assert dense.read_layers(1) == dense.read_layers(100) == dense.layers


def test_windows_are_known_by_layer() -> None:
    mistral = decoder_shape({**SIZES, "model_type": "mistral", "sliding_window": 16})
    assert mistral.windows == (16, 16, 16)
    for family in ("mixtral", "phi3", "starcoder2"):
        assert decoder_shape({**SIZES, "model_type": family, "sliding_window": 16}).windows == (16, 16, 16)
    switched = {**SIZES, "model_type": "qwen3_moe", "sliding_window": 16}
    assert decoder_shape({**switched, "use_sliding_window": True}).windows == (16, 16, 16)
    assert decoder_shape({**switched, "use_sliding_window": False}).windows == (None, None, None)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert decoder_shape({**SIZES, "model_type": "x", "sliding_window": 8, "layer_types": kinds}).windows == (
        8,
        None,
        8,
    )
    assert decoder_shape({**SIZES, "model_type": "qwen2", "sliding_window": 8}).windows == (None,) * 3


def test_a_directory_that_says_nothing_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json: it does not say"):
        read_decoder_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UserError, match="num_attention_heads"):
        read_decoder_shape(tmp_path)


def test_a_shape_is_read_without_torch(tmp_path: Path) -> None:
    program = "import sys, temper.planning.shape, temper.planning.gpus; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
