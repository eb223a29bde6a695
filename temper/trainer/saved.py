"""All that a trainer leaves in a checkpoint.

Owns: which files there are, and that nothing is taken over from a checkpoint of something else. Refuses: how tensors
are held (adamw/, weights.py), and when a checkpoint is made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from temper.errors import UserError
from temper.models.lora.wrapping import has_adapter, save_adapter
from temper.models.save import save_description
from temper.trainer.adamw.files import read_tensors, write_tensors
from temper.trainer.optim import MasterAdamW, require_same_tensors
from temper.trainer.ranks.parts import WholeTensors, is_cut, under_own_name
from temper.trainer.ranks.sums import rank_and_world
from temper.trainer.ranks.writing import NotWritten, do_together, write_states, write_weights
from temper.trainer.weights import ModelFiles, kept_tensors, save_weights, stored_tensors, take_over, whole_weights

STATE_FOLDER = "trainer"
"""Folder of the state inside a checkpoint: other tools take every *.safetensors file beside the weights for weights."""


class Beside(Protocol):
    """What has files of its own in that folder: a critic, a reference that moves."""

    def save(self, folder: Path) -> None: ...

    def wholes(self) -> Sequence[Mapping[str, Tensor]]:
        """What save() reads, in its order: all ranks with parts read it."""

    def load(self, folder: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class SavedTrainer:
    """What is written and read, whole, for every number of ranks."""

    model: nn.Module
    optimizer: MasterAdamW
    files: ModelFiles
    beside: Sequence[Beside] = ()

    def write(self, folder: Path, tokenizer: Any, counters: Mapping[str, Any]) -> None:
        """Of several ranks the first writes, and all of them where they hold parts."""
        own = folder / STATE_FOLDER
        if is_cut(self.model):
            try:
                self._write_parts(folder, tokenizer)
            except NotWritten:
                return  # rank 0 says so
        else:
            save_weights(self.model, tokenizer, folder, self.files)
            own.mkdir()
            write_tensors(self.optimizer.tensors(), own, "optimizer")
        if rank_and_world()[0]:
            for tensors in (tensors for part in self.beside for tensors in part.wholes()):
                for name in tensors:
                    tensors[name]  # all ranks give their parts
            return
        state = {**counters, "optimizer_steps": self.optimizer.num_steps, "dtype": str(self._dtype)}
        (own / "state.json").write_text(json.dumps(state, sort_keys=True))
        for part in self.beside:
            part.save(own)

    def _write_parts(self, folder: Path, tokenizer: Any) -> None:
        """Weights and optimiser states, by all ranks."""
        own, weights = folder / STATE_FOLDER, whole_weights(self.model)
        adapter = dict(weights) if has_adapter(self.model) else None  # small: gathered, and written by rank 0

        def begin() -> None:
            if rank_and_world()[0] == 0:
                with under_own_name(self.model):
                    if adapter is None:
                        save_description(self.model, tokenizer, folder)
                    else:
                        save_adapter(self.model, tokenizer, folder, adapter)
                own.mkdir()

        do_together(begin)
        if adapter is None:
            config: Any = self.model.config
            write_weights(weights, folder, config.model_type)
        states = self.optimizer.tensors()
        assert isinstance(states, WholeTensors), "the optimiser of a cut model is cut"
        write_states(states, own, "optimizer")

    def read(self, folder: Path) -> dict[str, Any]:
        """Takes over weights, moments and what lies beside them; returns the counters."""
        own = folder / STATE_FOLDER
        if not (own / "state.json").is_file():
            raise UserError(f"{folder} has no {STATE_FOLDER}/state.json: it holds a model but no training to continue")
        state: dict[str, Any] = json.loads((own / "state.json").read_text())
        if state["dtype"] != str(self._dtype):
            raise UserError(
                f"{folder} was trained in {state['dtype']} and this run is in {self._dtype}: its moments and master "
                f"weights do not fit. Set model.dtype to what it was"
            )
        stored = stored_tensors(self.model, folder, self._dtype, self.files)
        current = kept_tensors(self.model)
        require_same_tensors(current, stored, f"checkpoint {folder}")
        self.optimizer.load_tensors(read_tensors(own, "optimizer"), state["optimizer_steps"])
        for part in self.beside:
            part.load(own)
        take_over(current, stored)
        return state

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype
