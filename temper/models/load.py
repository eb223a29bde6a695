"""Hugging Face checkpoints in.

Owns: reading model directories, end-of-turn ids, the shape facts others need. Refuses: finding and fetching them
(folders/hub.py), and models that would be computed wrongly (families.py, proof.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from temper.errors import UserError
from temper.folders.hub import find_checkpoint as find_checkpoint
from temper.folders.integrity import verify
from temper.folders.pretrained import read_pretrained
from temper.models.attention_interface import ATTENTION_NAME
from temper.models.decoder import WALKED_FAMILIES, Numerics, can_walk, lay_end_to_end, set_numerics
from temper.models.families import freeze_rotations, require_supported, steady_context
from temper.models.lora.wrapping import load_merged
from temper.models.proof import require_proven

transformers_logging.disable_progress_bar()  # its bars would tear the live panel


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What batching, memory planning and error messages need to know, without loading weights."""

    family: str
    """model_type of the configuration, e.g. "llama"."""
    num_layers: int
    width: int
    """Size of a hidden state."""
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    """Tokens of the longest row, prompt included: where a model's rotations switch with length, up to there."""


def read_shape(folder: Path) -> ModelShape:
    """The shape, from the description alone. UserError for a model that Temper is known to compute wrongly."""
    config = read_config(folder)
    require_supported(config, folder)
    return shape_of(config)


def read_config(folder: Path) -> Any:
    """What transformers makes of config.json, without code from the directory."""
    verify(folder)
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: the model cannot be loaded: {error}") from error


def shape_of(config: Any) -> ModelShape:
    text = config.get_text_config()
    # DeepSeek's head_dim is that of its rotated part alone.
    head_dim = getattr(text, "qk_head_dim", None) or getattr(text, "head_dim", None)
    head_dim = head_dim or text.hidden_size // text.num_attention_heads
    return ModelShape(
        family=text.model_type,
        num_layers=text.num_hidden_layers,
        width=text.hidden_size,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=head_dim,
        vocab_size=text.vocab_size,
        max_context=steady_context(config),
    )


def load_model(folder: Path, dtype: torch.dtype, device: torch.device, numerics: Numerics = "fast") -> nn.Module:
    """The causal language model with Temper's attention, in evaluation mode, dropout off for good.

    Of an adapter directory: the model it belongs to with the adapter merged.
    """
    if (folder / "adapter_config.json").is_file():
        model: Any = load_merged(folder, dtype, device, load=load_model)
    else:
        read_shape(folder)  # first: what is refused by its description needs no weights
        model = _pretrained(folder, dtype)
    if numerics == "exact":
        _require_exact(model, folder)
    model = prepare(model).to(device)
    lay_end_to_end(model)
    set_numerics(model, numerics)
    require_proven(model, folder)
    return model


def _pretrained(folder: Path, dtype: torch.dtype) -> Any:
    try:
        model, info = read_pretrained(AutoModelForCausalLM, folder, dtype=dtype)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{folder}: the model cannot be loaded: {error}") from error
    if missing := sorted(info["missing_keys"]):  # transformers fills them with random numbers and only warns
        named = ", ".join(missing[:3])
        raise UserError(f"{folder} lacks weights {named} ({len(missing)} in all). Give a complete checkpoint")
    return model


def _require_exact(model: Any, folder: Path) -> None:
    family, advice = model.config.get_text_config().model_type, 'Use engine.numerics="fast": the gap is then bounded'
    if not can_walk(model):
        raise UserError(
            f'engine.numerics="exact" is made for the families {", ".join(WALKED_FAMILIES)}, and {folder} is a '
            f"{family}. {advice}"
        )


def prepare(model: Any) -> nn.Module:
    """Puts Temper's attention into a model. Dropout would make sampler and trainer disagree, so it is off."""
    freeze_rotations(model)
    model.set_attn_implementation(ATTENTION_NAME)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    model.eval()
    return model


def load_tokenizer(folder: Path) -> Any:
    verify(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: the tokenizer cannot be loaded: {error}") from error


def require_same_tokenizer(student: Path, teacher: Path) -> None:
    """A teacher that reads other ids would score text that nobody wrote."""
    ours, theirs = load_tokenizer(student).get_vocab(), load_tokenizer(teacher).get_vocab()
    differing = sorted(token for token in {*ours, *theirs} if ours.get(token) != theirs.get(token))
    if differing:
        raise UserError(
            f"{teacher} cannot teach {student}: their tokenizers differ in {len(differing)} tokens, e.g. "
            f"{differing[:3]}. Use a teacher with the same tokenizer"
        )


def end_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a turn: the tokenizer's and generation_config.json's (several for some chat models)."""
    ids = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    generation = folder / "generation_config.json"
    if generation.is_file():
        listed = json.loads(generation.read_text()).get("eos_token_id")
        ids |= set(listed if isinstance(listed, list) else [listed]) - {None}
    if not ids:
        raise UserError(f"{folder}: neither the tokenizer nor generation_config.json names an end-of-sequence token")
    return tuple(sorted(ids))
