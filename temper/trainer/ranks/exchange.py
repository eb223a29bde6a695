"""Rows that go to other ranks, and theirs that come here.

Owns: one exchange, forward and backward. Refuses: who gets what (experts.py, context.py).
Shapes: S rows that leave, R rows that arrive, _W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def exchange_rows(rows_SW: Tensor, sent: Sequence[int], received: Sequence[int], group: Any = None) -> Tensor:
    """Rows [R, W] in order of the ranks that they come from. sent, received: how many go to and come from each rank of
    the group. All of its ranks do it in the same order, forward and backward."""
    return _Exchange.apply(rows_SW, sent, received, group)  # type: ignore[no-any-return, no-untyped-call]


class _Exchange(torch.autograd.Function):
    """Gradients go back the way that rows came, and are not added up or averaged: every row is one token's."""

    @staticmethod
    def forward(ctx: Any, rows_SW: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
        ctx.way_back = received, sent, group
        return _exchanged(rows_SW, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grads[0], *ctx.way_back), None, None, None


def _exchanged(rows_SW: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    arrived_RW = rows_SW.new_empty(sum(received), rows_SW.shape[1])
    dist.all_to_all_single(arrived_RW, rows_SW.contiguous(), list(received), list(sent), group=group)
    return arrived_RW
