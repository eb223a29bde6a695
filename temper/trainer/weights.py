"""What the trainer hands to the samplers, and what it keeps in a checkpoint.

Owns: which tensors are weights, whole or as an adapter, and how they are written and read. Refuses: copying; a sampler
on the same device shares the storage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from temper.errors import UserError
from temper.models.experts.stored import StoredWeights
from temper.models.load import load_model
from temper.models.lora.wrapping import (
    LoadModel,
    MergedTensors,
    adapter_tensors,
    has_adapter,
    is_adapter_folder,
    read_adapter,
    save_adapter,
)
from temper.models.nf4.layers import holds_four_bits
from temper.models.save import save_model, saved_tensors
from temper.trainer.ranks.parts import (
    GatheredTensors,
    WholeTensors,
    is_cut,
    own_part,
    part_of,
    whole,
)
from temper.types import Publication


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """How a model is written and read whole: a causal language model's ways unless told otherwise."""

    save: Callable[[Any, Any, Path], None] = save_model
    """(model, tokenizer, folder)."""
    load: LoadModel = load_model


class Weights:
    """The weights of one model, to be published again and again: its tree of modules is walked only once."""

    def __init__(self, model: nn.Module) -> None:
        # Over a base in 4 bits the sampler computes with the factors, as the trainer does: nothing is merged.
        self._merged = MergedTensors(model, whole) if has_adapter(model) and not holds_four_bits(model) else None
        self._own = {} if self._merged is not None else saved_tensors(model)

    def publication(self, version: int) -> Publication:
        """Every parameter, and every buffer that belongs to the checkpoint, by name. Tied ones appear once.

        Of a model with an adapter: merged weights under the names of the model without it, each made when it is asked
        for. Over a base in 4 bits: codes, scales and factors as they are.
        """
        if self._merged is not None:
            return Publication(version=version, tensors=self._merged, alike=self._merged.unmerged)
        return Publication(version=version, tensors={name: tensor.detach() for name, tensor in self._own.items()})

    def gathered(self, version: int, gather: Callable[[Sequence[str]], Mapping[str, Tensor]]) -> Publication:
        """Of a cut model. gather: calls `whole` on all ranks."""
        tensors = GatheredTensors(self._own if self._merged is None else self._merged.unmerged, gather)
        return Publication(version=version, tensors=tensors, alike=tensors.outlines())

    def whole(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Tensors of a cut model; all ranks ask for the same."""
        with torch.no_grad():
            return {name: whole(self._own[name]) if self._merged is None else self._merged[name] for name in names}


def publish(model: nn.Module, version: int) -> Publication:
    """The weights of a model that is looked at once."""
    return Weights(model).publication(version)


def kept_tensors(model: nn.Module) -> Mapping[str, Tensor]:
    """What a checkpoint of this model holds, sharing its storage: all weights, or the adapter alone. Of a cut model
    tensors that are cut."""
    if has_adapter(model):
        return adapter_tensors(model)
    return {name: tensor.detach() for name, tensor in saved_tensors(model).items()}


def take_over(current: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    """Whole tensors into those of a model; of a cut one this rank's rows. In place: samplers may share the storage."""
    with torch.no_grad():
        for name, tensor in current.items():
            own_part(tensor).copy_(part_of(stored[name], tensor))


def whole_weights(model: nn.Module) -> WholeTensors:
    """What a checkpoint holds, on the CPU. Of a cut model made whole when it is asked for, by all ranks in this
    order."""
    tensors = kept_tensors(model)
    return WholeTensors(tensors, tensors)


def save_weights(model: nn.Module, tokenizer: Any, folder: Path, files: ModelFiles) -> None:
    (save_adapter if has_adapter(model) else files.save)(model, tokenizer, folder)


def stored_tensors(model: nn.Module, folder: Path, dtype: torch.dtype, files: ModelFiles) -> Mapping[str, Tensor]:
    """The same tensors as a checkpoint holds them. UserError when it is of the other kind or of another model."""
    if has_adapter(model):
        return read_adapter(folder, model)
    if is_adapter_folder(folder):
        raise UserError(f"{folder} holds an adapter and this run trains all weights. Set model.lora to what it was")
    if is_cut(model) and (stored := StoredWeights(folder)).fits(own := kept_tensors(model)):
        return {name: stored[name] for name in own}  # mapped from the file: this rank reads its own rows
    # Through transformers, which may store tensors under other names than the model's own.
    return publish(files.load(folder, dtype, torch.device("cpu")), 0).tensors
