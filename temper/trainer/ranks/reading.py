"""Models that are cut before they are read: a rank reads its own rows of every tensor and never holds the rest.

Owns: which directories can be read so, and filling a cut model from them. Refuses: the cut (parts.py), whole models
(models/load.py), and what is in the files (folders/integrity.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig

from temper.models.decoder import Numerics, can_walk, set_numerics
from temper.models.experts.stored import StoredWeights
from temper.models.families import freeze_rotations
from temper.models.load import load_model, prepare, read_config, read_shape
from temper.models.lora.wrapping import MergedTensors, adapter_tensors, has_adapter
from temper.models.save import saved_tensors
from temper.trainer.ranks.parts import cut
from temper.trainer.weights import take_over


def load_cut(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    numerics: Numerics = "fast",
    adapt: Callable[[nn.Module], nn.Module] = lambda model: model,
    experts: bool = False,
    tensor: int = 1,
) -> nn.Module:
    """As load_model, and this rank's part alone. A directory that must be read whole, one of an adapter or under other
    names than the model's, is held by the CPU until its layers are cut one after the other. adapt: puts an adapter on
    the model, which is cut along. experts, tensor: as parts.cut is told."""
    model: Any = _outline(folder, dtype, numerics)
    stored = StoredWeights(folder)
    if model is None or not stored.fits(saved_tensors(model)):
        model = adapt(load_model(folder, dtype, torch.device("cpu"), numerics))
        cut(model, device=device, experts=experts, tensor=tensor)
        return model
    model = adapt(model)
    factors = adapter_tensors(model) if has_adapter(model) else {}
    cut(model, device=device, experts=experts, tensor=tensor)
    model.to_empty(device=device)
    decoder: Any = model.get_decoder()
    decoder.rotary_emb = type(decoder.rotary_emb)(config=decoder.config).to(device)  # computed, not stored
    freeze_rotations(model)
    take_over(MergedTensors(model).unmerged if factors else saved_tensors(model), stored)
    if factors:
        take_over(adapter_tensors(model), factors)
    return model  # type: ignore[no-any-return]


def _outline(folder: Path, dtype: torch.dtype, numerics: Numerics) -> Any:
    """The model without numbers. None: it cannot be made so."""
    if (folder / "adapter_config.json").is_file():
        return None
    read_shape(folder)  # first: what is refused by its description needs no weights
    config = read_config(folder)
    if hasattr(config, "quantization_config"):
        return None
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    if not can_walk(model):
        return None
    if (generation := folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_dict(json.loads(generation.read_text()))
    set_numerics(model, numerics)
    return prepare(model)
