"""What a configuration says decides whether a model is computed, refused by name, or has to prove itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    Phi3Config,
    PhimoeConfig,
    Qwen2MoeConfig,
    Qwen3NextConfig,
)

from temper.errors import UserError
from temper.models.families import experts_of, is_tried, require_supported, steady_context
from temper.models.load import load_model, prepare, read_shape, shape_of
from temper.models.scorer import load_scorer

SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4, "rope_theta": 10000.0}


def phi3(original: int = 16) -> Phi3Config:
    return Phi3Config(**SMALL, original_max_position_embeddings=original, rope_parameters=dict(LONG))


@pytest.mark.parametrize(
    "family", ["qwen3_next", "qwen3_5_text", "jamba", "bamba", "falcon", "bloom", "diffllama", "gpt_oss"]
)
def test_families_that_would_give_wrong_text_are_refused_by_name(family: str) -> None:
    from transformers import CONFIG_MAPPING

    with pytest.raises(UserError, match=f"is a {family}, a family that Temper does not compute rightly: "):
        require_supported(CONFIG_MAPPING[family](), "models/some")


@pytest.mark.parametrize(
    ("family", "settings", "found"),
    [
        ("llama", {}, (0, 0)),
        ("mixtral", {}, (8, 2)),
        ("qwen2_moe", {}, (60, 4)),
        ("deepseek_v3", {}, (256, 8)),
        ("aria_text", {}, (8, 2)),
        ("ernie4_5_moe", {}, (64, 6)),
        ("hunyuan_v1_moe", {"num_experts": 8, "moe_topk": 3, "head_dim": 128}, (8, 3)),
        ("hunyuan_v1_moe", {"num_experts": 8, "moe_topk": [1, 4], "head_dim": 128}, (8, 2.5)),
        ("longcat_flash", {}, (512, 8)),  # 12 of 768, of which 256 do nothing
    ],
)
def test_experts_are_found_under_every_name(family: str, settings: dict[str, Any], found: tuple[int, float]) -> None:
    from transformers import CONFIG_MAPPING

    assert experts_of(CONFIG_MAPPING[family](**settings).to_dict()) == found


def test_layers_that_keep_other_state_are_refused_in_any_family() -> None:
    config = LlamaConfig(**SMALL)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UserError, match="layers of type linear_attention keep other state than keys and values"):
        require_supported(config, "models/some")


def test_settings_that_no_pass_applies_are_refused() -> None:
    require_supported(GraniteConfig(**SMALL), "models/some")
    with pytest.raises(UserError, match=r'scales logits in its own way \("logits_scaling" is 8.0\)'):
        require_supported(GraniteConfig(**SMALL, logits_scaling=8.0), "models/some")


@pytest.mark.parametrize("load", [load_model, load_scorer])
def test_a_refused_family_is_refused_before_its_weights_are_read(load: Any, tmp_path: Path) -> None:
    Qwen3NextConfig(**SMALL, head_dim=8).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="is a qwen3_next"):
        load(tmp_path, torch.float32, torch.device("cpu"))
    with pytest.raises(UserError, match="is a qwen3_next"):
        read_shape(tmp_path)


def test_the_context_ends_where_rotations_switch_or_a_mask_would_begin() -> None:
    assert steady_context(LlamaConfig(**SMALL)) == 64
    assert shape_of(phi3()).max_context == 16
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert steady_context(LlamaConfig(**SMALL, rope_parameters=dynamic)) == 64
    assert steady_context(PhimoeConfig(**SMALL, sliding_window=24)) == 24
    windowed = Qwen2MoeConfig(**SMALL, use_sliding_window=True, sliding_window=24, max_window_layers=1)
    assert steady_context(windowed) == 24
    assert steady_context(Qwen2MoeConfig(**SMALL)) == 64


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_long_row_leaves_the_rotations_of_all_others_alone(kind: str) -> None:
    """Dynamic frequencies change beyond the context of 64, longrope's beyond its 16."""
    dynamic = LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0})
    config = phi3() if kind == "longrope" else dynamic
    rotation = prepare(AutoModelForCausalLM.from_config(config)).get_decoder().rotary_emb  # type: ignore[operator]
    states, short, long = torch.zeros(1, 1, 32), torch.arange(12)[None], torch.arange(100)[None]
    before = rotation(states, short)[0]
    beside = rotation(states, long)[0][:, :12]
    assert torch.equal(before, beside)
    assert torch.equal(before, rotation(states, short)[0])


def test_only_families_of_the_table_count_as_tried() -> None:
    assert is_tried(LlamaConfig(**SMALL))
    unknown = LlamaConfig(**SMALL)
    unknown.model_type = "llama_of_tomorrow"
    assert not is_tried(unknown)
    require_supported(unknown, "models/some")
