"""Models written as ordinary Hugging Face directories, and which of their tensors belong there.

Owns: that. Refuses: reading (load.py), adapters' own files (lora/wrapping.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter, and every buffer that belongs to a checkpoint, by name. Tied ones appear once."""
    transient = {
        f"{place}.{name}" if place else name
        for place, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in transient}
    return dict(model.named_parameters()) | buffers


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes an ordinary Hugging Face directory: weights, configuration, tokenizer, chat template."""
    with _without_own_attention(model):
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_description(model: Any, tokenizer: Any, folder: Path) -> None:
    """The same directory without weights."""
    model.config.architectures = [type(model).__name__]  # as it would be with them: a reader must know the head
    with _without_own_attention(model):
        model.config.save_pretrained(folder)
    if (generation := getattr(model, "generation_config", None)) is not None:
        generation.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def _without_own_attention(model: Any) -> Iterator[None]:
    """A reader without Temper must not be asked for our attention."""
    implementation = model.config._attn_implementation
    model.config._attn_implementation = None
    try:
        yield
    finally:
        model.config._attn_implementation = implementation
