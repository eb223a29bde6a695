"""Experts under a low-rank adapter: every expert has factors of its own, and the weight that counts is W + scale B A.

As for linear layers (low_rank.py) the engine holds that weight, rounded to W's precision, and the trainer multiplies by
the very same one. Owns: the products of many experts under their factors, and their gradient. Refuses: making adapters
(wrapping.py), choosing experts.
Shapes: S copies of tokens sorted by expert, E experts, _D width in, _O width out, _R rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from temper.models.lora.low_rank import ADAPTER, is_adapted, merged_experts, split_factors, weight_name
from temper.models.ops import product

Grouped = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Ops.grouped."""


def expert_products(grouped: Grouped, rows_SD: Tensor, experts: Any, name: str, ends_E: Tensor) -> Tensor:
    """[S, O]: rows that are sorted by expert times the matrices `name` of their experts, adapted or not."""
    if not is_adapted(experts):
        return grouped(rows_SD, getattr(experts, name), ends_E)
    weight_EOD, adapter = getattr(experts.get_base_layer(), name), experts
    while is_adapted(adapter) and weight_name(adapter) != name:  # one inside the other, each for one parameter
        adapter = adapter.base_layer
    # By interface a peft layer can be switched off; then it is the layer inside.
    if not is_adapted(adapter) or adapter.disable_adapters:
        return grouped(rows_SD, weight_EOD, ends_E)
    fixed = (grouped, weight_EOD.detach(), ends_E, adapter.scaling[ADAPTER])
    return _LowRankExperts.apply(rows_SD, *fixed, *split_factors(adapter))  # type: ignore[no-any-return, no-untyped-call]


class _LowRankExperts(torch.autograd.Function):
    """Merged weights live for one product and are made again for the gradient: kept, they would be a second model."""

    @staticmethod
    def forward(
        ctx: Any, rows_SD: Tensor, grouped: Grouped, weight_EOD: Tensor, ends_E: Tensor, scale: float, *factors: Tensor
    ) -> Tensor:
        down_ERD, up_EOR = factors
        ctx.save_for_backward(rows_SD, weight_EOD, ends_E, down_ERD, up_EOR)
        ctx.grouped, ctx.scale = grouped, scale
        return grouped(rows_SD, merged_experts(weight_EOD, scale, down_ERD, up_EOR), ends_E)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The rounding of merged weights is passed over, and products are in the precision of the states, both as for
        linear layers."""
        (grad_SO,) = grads
        rows_SD, weight_EOD, ends_E, down_ERD, up_EOR = ctx.saved_tensors
        grad_rows = None
        if ctx.needs_input_grad[0]:
            merged_EOD = merged_experts(weight_EOD, ctx.scale, down_ERD, up_EOR)
            grad_rows = ctx.grouped(grad_SO, merged_EOD.transpose(1, 2), ends_E)
        narrow_grad_SR = ctx.grouped(grad_SO, up_EOR.to(grad_SO.dtype).transpose(1, 2), ends_E)
        narrow_SR = ctx.grouped(rows_SD, down_ERD.to(grad_SO.dtype), ends_E)
        found = (_outer_products(narrow_grad_SR, rows_SD, ends_E), _outer_products(grad_SO, narrow_SR, ends_E))
        slopes = [slope.to(down_ERD.dtype) * ctx.scale for slope in found]
        return grad_rows, None, None, None, None, *slopes


def _outer_products(left_SO: Tensor, right_SD: Tensor, ends_E: Tensor) -> Tensor:
    """[E, O, D]: left.T @ right over the rows of each expert; zero where it has none."""
    counts = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    pairs = zip(torch.split(left_SO, counts), torch.split(right_SD, counts), strict=True)
    return torch.stack([product(left.t(), right) for left, right in pairs])
