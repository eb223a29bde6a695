"""Products of rows with the matrices of their experts, and the way of tokens to experts and back.

Every token meets several experts. Its state is copied once for each, the copies are sorted by expert, and what belongs
to one expert is one product. On a GPU all shapes are fixed and nothing is read back by the host, so that a decode step
can be recorded.
Owns: the order of rows, the grouped product, adding up what the experts say. Refuses: choosing experts (routing.py).
Shapes: _T packed tokens, _D width, _K experts of a token, S = T * K copies, E experts, _O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]

GROUPED_BYTES = 16
"""Rows and weights must begin at multiples of this for torch's grouped product."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where the copies of each token go, sorted by expert."""

    order_S: Tensor
    """Which copy stands at each place: copy t * K + k is token t's for its k-th expert."""
    place_S: Tensor
    """The place of each copy; the inverse of order_S."""
    ends_E: Tensor
    """int32: place behind the last copy of each expert."""


def places_of(experts_TK: Tensor, num_experts: int) -> Places:
    """A stable sort: copies of one expert stay in order of tokens."""
    sorted_S, order_S = torch.sort(experts_TK.flatten(), stable=True)
    place_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(len(order_S), device=order_S.device))
    # Not bincount: it asks the device for the largest entry.
    every_E = torch.arange(num_experts, device=order_S.device)
    ends_E = torch.searchsorted(sorted_S, every_E, right=True, out_int32=True)
    return Places(order_S, place_S, ends_E)


def spread(hidden_TD: Tensor, places: Places) -> Tensor:
    """[S, D]: the state of each copy's token, sorted by expert."""
    return _Spread.apply(hidden_TD, places)  # type: ignore[no-any-return, no-untyped-call]


def collect(rows_SD: Tensor, places: Places, num_chosen: int) -> Tensor:
    """[T, K, D]: rows sorted by expert back to their tokens."""
    return _Collect.apply(rows_SD, places).unflatten(0, (-1, num_chosen))  # type: ignore[no-any-return, no-untyped-call]


class _Spread(torch.autograd.Function):
    """The gradient of a token is the sum over its copies, in their order: indexing would add them in any, on a GPU."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, places: Places) -> Tensor:
        ctx.places, ctx.num_tokens = places, len(hidden_TD)
        return hidden_TD.index_select(0, places.order_S // (len(places.order_S) // max(1, len(hidden_TD))))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        by_copy = grads[0].index_select(0, ctx.places.place_S)
        return by_copy.view(ctx.num_tokens, -1, by_copy.shape[1]).sum(1), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_SD: Tensor, places: Places) -> Tensor:
        ctx.places = places
        return rows_SD.index_select(0, places.place_S)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.places.order_S), None


def looped_products(linear: Linear, rows_SD: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> Tensor:
    """One product after the other, by `linear`. For CPUs and for dtypes that have no grouped product."""
    counts = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    # unbind: the gradient is put together once; indexing would make a tensor of all experts for each of them.
    pairs = zip(torch.split(rows_SD, counts), weight_EOD.unbind(0), strict=True)
    outputs = [linear(rows, weight, None) for rows, weight in pairs if len(rows)]
    return torch.cat(outputs) if outputs else rows_SD.new_empty(0, weight_EOD.shape[1])


def grouped_products(rows_SD: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> Tensor:
    """All products in one, on a GPU that has it."""
    if not can_group(weight_EOD):
        return looped_products(functional.linear, rows_SD, weight_EOD, ends_E)
    return _grouped()(rows_SD, weight_EOD.transpose(1, 2), offs=ends_E)


def exact_products(rows_SD: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> Tensor:
    """On a GPU, with bits of a row that depend on nothing beside it."""
    return _ExactProducts.apply(rows_SD, weight_EOD, ends_E)  # type: ignore[no-any-return, no-untyped-call]


class _ExactProducts(torch.autograd.Function):
    """Both sides must agree on the policy, not on its slope: gradients are those of the fast way."""

    @staticmethod
    def forward(ctx: Any, rows_SD: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> Tensor:
        from temper.models.kernels.experts import sorted_products

        ctx.save_for_backward(rows_SD, weight_EOD, ends_E)
        return sorted_products(rows_SD, weight_EOD, ends_E)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *leaves, ends_E = (tensor.detach() for tensor in ctx.saved_tensors)
        wanted = [leaf.requires_grad_() for leaf, wants in zip(leaves, ctx.needs_input_grad, strict=False) if wants]
        with torch.enable_grad():
            output = grouped_products(leaves[0], leaves[1], ends_E)
        found = iter(torch.autograd.grad(output, wanted, grads[0]))
        return *(next(found) if wants else None for wants in ctx.needs_input_grad[:2]), None


def can_group(weight_EOD: Tensor) -> bool:
    """Whether torch multiplies these in one kernel that never waits for the host."""
    if not weight_EOD.is_cuda or weight_EOD.dtype is not torch.bfloat16:
        return False
    has_kernel = torch.cuda.get_device_capability(weight_EOD.device) >= (8, 0)
    return has_kernel and all(size * weight_EOD.itemsize % GROUPED_BYTES == 0 for size in weight_EOD.shape[1:])


@cache
def _grouped() -> Callable[..., Tensor]:
    return getattr(functional, "grouped_mm", None) or torch._grouped_mm


def weighted_sum(rows_TKD: Tensor, weights_TK: Tensor) -> Tensor:
    """What the experts of each token say, times their weights."""
    return (rows_TKD * weights_TK.unsqueeze(-1)).sum(1).to(rows_TKD.dtype)


def ordered_sum(rows_TKD: Tensor, weights_TK: Tensor) -> Tensor:
    """The same, one expert after the other: a library's sum takes an order that may depend on the number of tokens."""
    weighted = rows_TKD.to(torch.promote_types(rows_TKD.dtype, torch.float32)) * weights_TK.unsqueeze(-1)
    first, *others = weighted.unbind(1)
    for other in others:
        first = first + other
    return first.to(rows_TKD.dtype)
