"""Whether a model can be shared out over trainers as a recipe asks, known from its description.

Owns: one look for every layout, before anything is started and before anything is read. Refuses: settings that exclude
each other (build/check.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from temper.errors import UserError
from temper.models.experts.routing import has_experts, num_experts_of
from temper.models.load import read_config
from temper.trainer.ranks.context import require_heads
from temper.trainer.ranks.experts import experts_of_rank
from temper.trainer.ranks.parts import require_walked
from temper.trainer.ranks.tensor import require_slices


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLayout:
    """How trainers share the model and its rows."""

    trainers: int = 1
    parts: bool = False
    experts: bool = False
    """Whether each keeps its own."""
    context: int = 1
    tensor: int = 1

    @property
    def is_plain(self) -> bool:
        """Whether every trainer has the whole model and rows of its own: that any model can."""
        return not (self.parts or self.experts) and self.context == self.tensor == 1


def require_layout(folder: Path, layout: TrainerLayout) -> None:
    """UserError where the model of a directory cannot be shared out so. Its weights are not read."""
    if layout.is_plain:
        return
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(read_config(folder), trust_remote_code=False)
    config = model.get_decoder().config.get_text_config()
    if layout.parts:
        require_walked(model)
    if layout.context > 1:
        if has_experts(model):
            raise UserError(f"cluster.context: {folder} is a model with experts. Use cluster.context = 1")
        require_heads(config, layout.context)
    if layout.tensor > 1:
        require_slices(model, layout.tensor, layout.trainers)
    if layout.experts:
        if not has_experts(model):
            raise UserError(f"cluster.experts: {folder} is a model without experts. Use cluster.experts = false")
        experts_of_rank(num_experts_of(config), 0, layout.trainers)
