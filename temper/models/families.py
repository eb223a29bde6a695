"""Which models Temper computes rightly, decided by their configuration: the one place that says yes or no.

A family that keeps other state than keys and values, or writes attention in its own way, would give wrong text without
an error. families.json says which of transformers' families were tried and what was seen (benchmarks/families.py makes
it). A family that is not in it is neither: whoever loads it compares it with itself first (proof.py).
Owns: that decision, up to which length it holds, and what families call their settings. Refuses: loading anything; a
configuration is enough.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from temper.errors import UserError

TABLE = Path(__file__).with_name("families.json")
"""{"tried": [model_type, ...], "refused": {model_type: reason}, ...}."""

LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
"""Layers that know of earlier tokens by keys and values alone."""
REFUSED_SETTINGS = {
    "logits_scaling": "scales logits in its own way",
    "logit_scale": "scales logits in its own way",
    "attn_logit_softcapping": "caps the logits of attention",
}
"""Settings of a configuration that no pass of Temper's applies; absent, null and 1 are harmless."""
MASKED_WINDOWS = {
    "phimoe": "sliding_window",
    "qwen2_moe": "sliding_window",
    "llama4": "attention_chunk_size",
    "llama4_text": "attention_chunk_size",
}
"""Families that apply this window by a mask, which Temper's attention never sees. Of a text that fits into the window
nothing is masked."""

WINDOWED = ("ministral3", "mistral", "mixtral", "phi3", "starcoder2")
"""Families whose configuration has the window of all layers."""
OTHER_NAMES = {
    "expert_ffn_hidden_size": "moe_intermediate_size",
    "ffn_dim": "intermediate_size",
    "ffn_hidden_size": "intermediate_size",
    "moe_k": "num_experts_per_tok",
    "moe_layer_interval": "decoder_sparse_step",
    "moe_layer_start_index": "first_k_dense_replace",
    "moe_num_experts": "num_experts",
    "moe_num_shared_experts": "num_shared_experts",
    "moe_topk": "num_experts_per_tok",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "num_dense_layers": "first_k_dense_replace",
    "num_local_experts": "num_experts",
    "shared_intermediate_size": "shared_expert_intermediate_size",
}
"""What some families call a setting, and what most call it."""

EXAMPLES = ("llama", "mistral", "qwen3", "gemma3_text", "olmo2")


def require_supported(config: Any, where: object) -> None:
    """UserError for a model that Temper is known to compute wrongly. `where`: its directory, for the message."""
    text = config.get_text_config()
    reason = _table()["refused"].get(config.model_type)
    if others := sorted({*(getattr(text, "layer_types", None) or ())} - {*LAYER_TYPES}):
        reason = f"its layers of type {', '.join(others)} keep other state than keys and values"
    for key, does in REFUSED_SETTINGS.items():
        if getattr(text, key, None) not in (None, 1):
            reason = f'it {does} ("{key}" is {getattr(text, key)})'
    if reason is not None:
        raise UserError(
            f"{where} is a {config.model_type}, a family that Temper does not compute rightly: {reason}. Use a model "
            f"of another family, such as {', '.join(EXAMPLES)}; docs/engine.md lists those that were tried"
        )


def is_tried(config: Any) -> bool:
    """Whether the family was tried and found right. Neither tried nor refused: it has to prove itself (proof.py)."""
    return config.model_type in _table()["tried"]


def steady_context(config: Any) -> int:
    """Tokens up to which a row is computed alike, however long the rows beside it are: at most the model's context.

    Rotations that depend on length (longrope; dynamic, beyond the context alone) do so for all rows of a pass at once:
    a long row would change the answers of its neighbours, and its own keys that are kept already.
    """
    text = config.get_text_config()
    window = getattr(text, MASKED_WINDOWS.get(config.model_type, ""), None)
    return min(limit for limit in (text.max_position_embeddings, window, *_switches(text)) if limit)


def freeze_rotations(model: Any) -> None:
    """Rotations that depend on length stay what they are up to steady_context, whatever is computed."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str):
            module.rope_type = _frozen(kind)
        elif isinstance(kind, Mapping):
            module.rope_type = {layer: _frozen(one) for layer, one in kind.items()}


def _frozen(rope_type: str) -> str:
    """A name under which transformers never computes frequencies anew."""
    return "frozen" if rope_type == "longrope" or "dynamic" in rope_type else rope_type


def _switches(text: Any) -> Iterator[int]:
    """Lengths at which rotations of a configuration switch to other frequencies."""
    for rotation in _rotations(text):
        if rotation.get("rope_type") == "longrope":
            original = rotation.get("original_max_position_embeddings")
            yield original or getattr(text, "original_max_position_embeddings", None) or text.max_position_embeddings


def _rotations(text: Any) -> Iterator[Mapping[str, Any]]:
    """Settings of the rotations: one for all layers, or one for each type of layer."""
    given = getattr(text, "rope_parameters", None) or {}
    parts = [part for part in given.values() if isinstance(part, Mapping)]
    yield from parts or [given]


@cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE.read_text())  # type: ignore[no-any-return]


def common_settings(text: Mapping[str, Any]) -> dict[str, Any]:
    """A text configuration, with every setting also under the name that most families give it."""
    found = {common: text[name] for name, common in OTHER_NAMES.items() if text.get(name) and not text.get(common)}
    if text.get("model_type") == "longcat_flash":  # each of its layers is two, and one of both has experts
        found |= {"num_hidden_layers": 2 * int(text["num_layers"]), "decoder_sparse_step": 2}
    return {**text, **found}


def experts_of(text: Mapping[str, Any]) -> tuple[int, float]:
    """Experts that a layer with experts chooses from, and how many work on a token; 0 and 0 of a dense model.

    Of numbers by layer (HunYuan) the mean. Where some of those that are chosen do nothing (LongCat), these are left
    out, as if all were chosen equally often.
    """
    settings = common_settings(text)
    num_experts = int(_mean(settings.get("num_experts")))
    if not num_experts:
        return 0, 0.0
    chosen = _mean(settings.get("num_experts_per_tok"))
    return num_experts, chosen * num_experts / (num_experts + idle_experts(settings))


def idle_experts(text: Mapping[str, Any]) -> int:
    """Experts of a layer that can be chosen and do nothing: they hand on what they are given."""
    return int(text.get("zero_expert_num") or 0)


def _mean(given: Any) -> float:
    """Of a number, or of one for each layer; 0 where nothing is given."""
    by_layer = given if isinstance(given, list | tuple) else [given or 0]
    return sum(by_layer) / max(1, len(by_layer))


def attention_windows(text: Mapping[str, Any]) -> tuple[int | None, ...]:
    """By layer of a text configuration, how many tokens a token sees, itself included; None: all before it."""
    count = int(common_settings(text)["num_hidden_layers"])
    window = text.get("sliding_window") or None
    if kinds := text.get("layer_types"):
        by_kind = {"sliding_attention": window, "chunked_attention": text.get("attention_chunk_size")}
        return tuple(by_kind.get(kind) for kind in kinds)[:count]
    family = text.get("model_type")
    has_window = family in WINDOWED or (family == "qwen3_moe" and text.get("use_sliding_window"))
    return (window if has_window else None,) * count
