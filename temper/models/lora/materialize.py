"""An adapter directory as an ordinary Hugging Face one: for rewards, for engines elsewhere, for `temper export`.

Owns: writing it whole or not at all, the proof that it is the trained model, and the copy that is kept beside an
adapter. Refuses: changing either original.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from temper.errors import BackendError, UserError
from temper.folders.integrity import write_manifest
from temper.models.load import load_model, load_tokenizer
from temper.models.lora.wrapping import (
    LoadModel,
    MergedTensors,
    content_digest,
    fold,
    is_adapter_folder,
    load_adapted,
    load_merged,
    trained_dtype,
)
from temper.models.nf4.layers import holds_four_bits
from temper.models.save import save_model, saved_tensors
from temper.models.scorer import load_scorer, scorer_kind

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""How far one logit may be from that of peft's own pass, which adds the adapter's product to the states instead of to
the weights: in bfloat16 the merged weight is rounded, there it is not."""
PROBE_TOKENS = 24
UNFINISHED = ".tmp-"
FACTS = "temper_*.json"
"""Files beside the weights that say something about the model, such as the scale of a reward model's scores."""


def whole(folder: Path) -> Path:
    """A directory with all weights: `folder`, or for an adapter the merged model, made once and kept beside it.

    The copy's name has the digest of the adapter and of what that belongs to, so another one is never taken for it.
    """
    if not is_adapter_folder(folder):
        return folder
    out = folder.with_name(f"merged-{folder.name}-{content_digest(folder)}")
    if not out.is_dir():
        mine = materialize(folder, out.with_name(f"{UNFINISHED}{out.name}-{os.getpid()}"))
        write_manifest(mine)
        try:
            mine.rename(out)
        except OSError:  # another process was faster, and its copy is the same
            shutil.rmtree(mine)
            if not out.is_dir():
                raise
    return out


def _loader(folder: Path) -> LoadModel:
    """How the model of a directory is read: its description says whether it has a scalar head."""
    kind = scorer_kind(folder)
    return load_model if kind is None else partial(load_scorer, kind=kind)


def load_trained(folder: Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Whatever a checkpoint directory holds, a policy or a reward model, whole or as an adapter."""
    load = _loader(folder)
    return load_merged(folder, dtype, device, load=load) if is_adapter_folder(folder) else load(folder, dtype, device)


def materialize(folder: Path, out: Path, *, origin: Path | None = None) -> Path:
    """Writes the merged model to `out` and returns it. BackendError, and nothing is left, when it is not the same.

    `origin`: where the model of the adapter lies now, when it was moved.
    """
    if out.exists():
        raise UserError(f"{out} exists already. Give a new directory")
    making = out.with_name(f"{UNFINISHED}{out.name}")
    shutil.rmtree(making, ignore_errors=True)
    making.parent.mkdir(parents=True, exist_ok=True)
    dtype, load = trained_dtype(folder), _loader(folder)
    try:
        model = load_adapted(folder, dtype, torch.device("cpu"), origin=origin, load=load)
        wanted = probe(model)
        save_model(fold(model), load_tokenizer(folder), making)
        del model
        merged = _merged(load_adapted(folder, dtype, torch.device("cpu"), origin=origin, load=load))
        _require_same(load(making, dtype, torch.device("cpu")), merged, wanted, str(folder))
        for fact in folder.glob(FACTS):
            shutil.copy2(fact, making / fact.name)
        making.rename(out)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return out


def _merged(model: nn.Module) -> Mapping[str, Tensor]:
    """Merged weights by name, one at a time where the model is not in 4 bits."""
    return saved_tensors(fold(model)) if holds_four_bits(model) else MergedTensors(model)


@torch.no_grad()
def probe(model: Any) -> Tensor:
    """Logits of a fixed text by the modules' own pass, not by Temper's."""
    ids = torch.randint(model.config.get_text_config().vocab_size, (1, PROBE_TOKENS), generator=_seeded())
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        return model(ids).logits[0].float()
    finally:
        model.set_attn_implementation(ours)


def _require_same(written: nn.Module, merged: Mapping[str, Tensor], wanted: Tensor, folder: str) -> None:
    """Both the weights, to the bit, and what comes out of them."""
    dtype = next(written.parameters()).dtype
    found = dict(written.named_parameters()) | dict(written.named_buffers())
    for name, tensor in merged.items():
        if not torch.equal(found[name], tensor):
            raise BackendError(f'{folder}: the merged directory has another "{name}" than the adapter on its model')
    gap = (probe(written) - wanted).abs().max().item()
    if not gap <= TOLERANCE[dtype]:
        raise BackendError(
            f"{folder}: logits of the merged directory differ from those of the adapter by {gap:.3g}; allowed is "
            f"{TOLERANCE[dtype]:g}. It was not written"
        )


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)
