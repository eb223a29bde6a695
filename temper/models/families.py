"""Which models Temper computes rightly, decided by their configuration: the one place that says yes or no.

A family that keeps other state than keys and values, or writes attention in its own way, would give wrong text without
an error. families.json says which of transformers' families were tried and what was seen (benchmarks/families.py makes
it). A family that is not in it is neither: whoever loads it compares it with itself first (proof.py).
Owns: that decision, and up to which length it holds. Refuses: loading anything; a configuration is enough.
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


def attention_windows(table: Mapping[str, Any]) -> tuple[int | None, ...]:
    """By layer, how many tokens a token sees, itself included; None: all before it. `table`: a text configuration."""
    count = int(table["num_hidden_layers"])
    window = table.get("sliding_window") or None
    if kinds := table.get("layer_types"):
        by_kind = {"sliding_attention": window, "chunked_attention": table.get("attention_chunk_size")}
        return tuple(by_kind.get(kind) for kind in kinds)[:count]
    return (window if table.get("model_type") == "mistral" else None,) * count
