"""Taking and placing rows of a tensor by an index without repeats: each is the other's gradient.

Indexing in torch would add gradients up row by row (slow on CPU, in no fixed order on a GPU); with no repeats there is
nothing to add. Refuses: repeated indices, which would lose gradient; callers make them from lengths and masks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def take_rows(source: Tensor, index: Tensor) -> Tensor:
    """source[index]."""
    return _Take.apply(source, index)  # type: ignore[no-untyped-call]


def place_rows(source: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """A tensor of num_rows rows, source[i] at row index[i], zero elsewhere."""
    return _Place.apply(source, index, num_rows)  # type: ignore[no-untyped-call]


def _placed(source: Tensor, index: Tensor, num_rows: int) -> Tensor:
    return source.new_zeros((num_rows, *source.shape[1:])).index_copy_(0, index, source)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = source.shape[0]
        return source.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return _placed(grads[0], index, ctx.num_rows), None


class _Place(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(index)
        return _placed(source, index, num_rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return grads[0].index_select(0, index), None, None
