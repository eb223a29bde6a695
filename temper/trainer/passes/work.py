"""What the passes of a step had to compute, counted in FLOPs as they are made.

Owns: the count of one model. Refuses: what a FLOP is counted for (runs/flops.py).
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from temper.models.experts.balance import is_balanced
from temper.models.families import attention_windows, experts_of
from temper.models.load import shape_of
from temper.models.nf4.layers import four_bit_sizes
from temper.runs.flops import ModelSize, PassWork, active_parameters
from temper.trainer.passes.sharing import shared_places
from temper.trainer.ranks.context import context_of_rank, is_counted
from temper.trainer.ranks.sums import sum_over_ranks
from temper.types import Microbatch


def size_of(model: Any, *, has_head: bool = True) -> ModelSize:
    """has_head: whether passes make logits; a model that scores makes none."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings() if has_head else None
    apart = {id(part.weight) for part in (model.get_input_embeddings(), head) if part is not None}
    inside = {n: p for n, p in model.named_parameters() if p.dim() > 1 and id(p) not in apart}
    settings = config.to_dict()
    num_experts, experts_per_token = experts_of(settings)
    active = partial(active_parameters, num_experts=num_experts, experts_per_token=experts_per_token)
    trained, frozen = (
        {name: _size(p, num_experts) for name, p in inside.items() if p.requires_grad is is_trained}
        for is_trained in (True, False)
    )
    frozen |= four_bit_sizes(model)
    return ModelSize(
        trained=active(trained),
        frozen=active(frozen),
        head=0 if head is None else head.weight.numel(),
        is_head_trained=head is not None and head.weight.requires_grad,
        attention_width=config.num_attention_heads * shape_of(model.config).head_dim,
        windows=attention_windows(settings),
    )


def _size(weight: nn.Parameter, num_experts: int) -> int:
    """Without what a family holds for experts that do nothing (LongCat): stacks are of matrices, expert by expert."""
    is_longer = weight.dim() == 3 and 0 < num_experts < len(weight)
    return weight[:num_experts].numel() if is_longer else weight.numel()


def work_of(microbatch: Microbatch, *, shares: bool, has_backward: bool) -> PassWork:
    """shares: whether a prompt that rows have in common is computed once."""
    is_computed = np.ones(len(microbatch.token_ids), dtype=bool)
    for places_Nm in shared_places(microbatch) if shares else ():
        is_computed[places_Nm[:, 1:]] = False
    return PassWork(
        positions=microbatch.positions.cpu().numpy()[is_computed],
        num_scored=int(microbatch.loss_mask.sum()),
        has_backward=has_backward,
    )


class FlopCounter:
    """Adds up the passes of one model until they are taken."""

    def __init__(self, model: nn.Module, needs: Collection[str]) -> None:
        """needs: of the objective."""
        parameter = next(model.parameters())
        self._device = parameter.device
        self._size = size_of(model, has_head="scores" not in needs)
        # As drawn_states does, and its callers.
        is_apart = bool({"scores", "noise", "router"} & set(needs)) or is_balanced(model)
        self._shares = parameter.dtype != torch.float64 and not is_apart
        self._total = 0.0

    def count(self, microbatch: Microbatch, *, has_backward: bool) -> None:
        if is_counted():
            shares = self._shares and context_of_rank() is None
            self._total += self._size.flops(work_of(microbatch, shares=shares, has_backward=has_backward))

    def take(self) -> float:
        """FLOPs since the last call, over all ranks."""
        total = torch.tensor(self._total, dtype=torch.float64, device=self._device)
        self._total = 0.0
        sum_over_ranks([total])
        return total.item()
