"""A reference model that may move: when, how far, and what a resumed run has to know about it.

Owns: the moving reference's weights and the held-out scores its rule looks at. Refuses: the rule (objectives/).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from temper.models.lora.wrapping import has_adapter
from temper.models.save import saved_tensors
from temper.objectives.objective import Moment, ReferenceRule
from temper.trainer.optim import require_same_tensors
from temper.trainer.ranks.parts import OwnParts, PartsOf, is_cut, own_part
from temper.trainer.weights import kept_tensors, publish, take_over, whole_weights

_WEIGHTS, _STATE = "reference.safetensors", "reference.json"


class MovingReference:
    """Follows the policy by its rule. A reference without a rule needs none of this: it is where the stage started."""

    def __init__(self, model: nn.Module, rule: ReferenceRule) -> None:
        self._model, self._rule = model, rule
        self._best_score: float | None = None
        self._stalled = 0

    def observe(self, score: float) -> None:
        """A held-out score, as rules that wait for a stall see it."""
        if self._best_score is None or score > self._best_score:
            self._best_score, self._stalled = score, 0
        else:
            self._stalled += 1

    def after_step(self, policy: nn.Module, step: int) -> tuple[bool, bool]:
        """Moves the reference when the rule says so. Returns whether it moved, and whether moments are to be reset."""
        refresh = self._rule(Moment(step=step, stalled_evaluations=self._stalled))
        if refresh is None:
            return False, False
        own_tensors = saved_tensors(self._model)  # biases of routers, too
        # Merged ones of an adapter; of a cut model this rank's parts, for the reference is cut alike.
        targets = publish(policy, step).tensors
        if is_cut(policy):
            targets = PartsOf(targets, own_tensors) if has_adapter(policy) else OwnParts(targets)
        with torch.no_grad():
            for name, tensor in own_tensors.items():
                own, target = own_part(tensor), targets[name]
                if target.data_ptr() != own.data_ptr():  # shared: one that the adapter leaves alone
                    own.lerp_(target.to(own), refresh.mix)
        self._stalled = 0
        return True, refresh.resets_optimizer

    def save(self, folder: Path) -> None:
        (wholes,) = self.wholes()
        save_file({name: tensor.contiguous() for name, tensor in wholes.items()}, folder / _WEIGHTS)
        (folder / _STATE).write_text(json.dumps({"best_score": self._best_score, "stalled": self._stalled}))

    def wholes(self) -> list[Mapping[str, Tensor]]:
        """What save() writes."""
        return [whole_weights(self._model)]

    def load(self, folder: Path) -> None:
        stored, own = load_file(folder / _WEIGHTS), kept_tensors(self._model)
        require_same_tensors(own, stored, f"{folder / _WEIGHTS}")
        take_over(own, stored)
        state = json.loads((folder / _STATE).read_text())
        self._best_score, self._stalled = state["best_score"], state["stalled"]
