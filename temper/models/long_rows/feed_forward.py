"""A function of single tokens over many of them, a chunk at a time: its inside never exists for all tokens at once.

At 32,768 tokens gate, up and their gradients of a 7B layer are 7.4 GB, four times all else of the layer.
Owns: the chunks, and the gradient from the inputs alone. Refuses: functions in which tokens see each other.
Shapes: _T packed tokens, _D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_TOKENS = 16384
"""Enough that products run at full speed."""

Compute = Callable[[Tensor], Tensor]
"""[T, D] -> [T, D], token by token."""


def in_chunks(compute: Compute, hidden_TD: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """compute(hidden), differentiable in the hidden states and in these parameters, which `compute` reads itself."""
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    if not (torch.is_grad_enabled() and (hidden_TD.requires_grad or wanted)):
        return _computed(compute, hidden_TD)
    carried_TD = _KeepInput.apply(hidden_TD, compute, *wanted)  # type: ignore[no-untyped-call]
    return _Compute.apply(carried_TD, compute)  # type: ignore[no-any-return, no-untyped-call]


def _computed(compute: Compute, hidden_TD: Tensor) -> Tensor:
    return torch.cat([compute(part) for part in torch.split(hidden_TD, CHUNK_TOKENS)])


class _KeepInput(torch.autograd.Function):
    """The identity, whose backward pass is all of `compute`'s.

    Apart from _Compute so that a layer that is computed anew for its gradient stops here: what it would compute next,
    nobody needs, because this backward pass computes it again anyway, a chunk at a time.
    """

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, compute: Compute, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_TD)
        ctx.compute, ctx.parameters = compute, parameters
        return hidden_TD.view_as(hidden_TD)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of parameters are summed in float32 over the chunks: chunks of many roundings would be seen."""
        (hidden_TD,) = ctx.saved_tensors
        slopes: list[Tensor] = []
        sums: list[Tensor] = []
        for part, grad in zip(torch.split(hidden_TD, CHUNK_TOKENS), torch.split(grad_TD, CHUNK_TOKENS), strict=True):
            with torch.enable_grad():
                leaf = part.detach().requires_grad_()
                output = ctx.compute(leaf)
            slope, *found = torch.autograd.grad(output, [leaf, *ctx.parameters], grad)
            slopes.append(slope)
            wide = [one.to(torch.promote_types(one.dtype, torch.float32)) for one in found]
            sums = [total.add_(one) for total, one in zip(sums, wide, strict=True)] if sums else wide
        narrow = [total.to(parameter.dtype) for total, parameter in zip(sums, ctx.parameters, strict=True)]
        return torch.cat(slopes), None, *narrow


class _Compute(torch.autograd.Function):
    """compute(hidden), whose gradient goes to _KeepInput as it is."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, compute: Compute) -> Tensor:
        return _computed(compute, hidden_TD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
