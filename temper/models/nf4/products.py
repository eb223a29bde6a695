"""Linear layers over a base in 4 bits: dequantise(W) x + scale B (A x), for engine and trainer alike.

Merged weights, as over a base in full precision, would have to be made for every product of every decode step; the
adapter is added to the states instead, by the same function on both sides, so that both have the same policy.
Owns: this arithmetic and its gradient. Refuses: making adapters (lora/wrapping.py).
Shapes: _T packed tokens, _D width in, _O width out of all layers side by side, _R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from temper.models.lora.low_rank import ADAPTER, is_adapted
from temper.models.nf4.layers import FourBitLinear, joined_weight
from temper.models.ops import Linear, product


def is_four_bit(module: Any) -> bool:
    """Whether this layer, adapted or not, has its weight in 4 bits."""
    return isinstance(module.base_layer if is_adapted(module) else module, FourBitLinear)


def four_bit_linear(linear: Linear, hidden_TD: Tensor, modules: Sequence[Any]) -> Tensor:
    """Outputs of these layers side by side, adapted or not."""
    layers = [module.base_layer if is_adapted(module) else module for module in modules]
    is_on = [is_adapted(module) and not module.disable_adapters for module in modules]
    scales = [module.scaling[ADAPTER] if on else 0.0 for module, on in zip(modules, is_on, strict=True)]
    factors = [
        factor
        for module, on in zip(modules, is_on, strict=True)
        for factor in ((module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight) if on else (None, None))
    ]
    return _FourBitLinear.apply(hidden_TD, linear, layers, scales, *factors)  # type: ignore[no-any-return, no-untyped-call]


class _FourBitLinear(torch.autograd.Function):
    """Weights live for one product and are made again for the gradient: kept, they would be the model in full."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, linear: Linear, layers: list[FourBitLinear], scales: list[float], *factors: Any
    ) -> Tensor:
        ctx.save_for_backward(hidden_TD, *factors)
        ctx.layers, ctx.scales = layers, scales
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        assert len(biases) in (0, len(layers)), "projections of one layer all have a bias or none has"
        output_TO = linear(hidden_TD, joined_weight(layers), torch.cat(biases) if biases else None)
        for part_TO, scale, (down, up) in zip(_split(output_TO, layers), scales, _pairs(factors), strict=True):
            if down is not None:
                narrow_TR = linear(hidden_TD, down.to(hidden_TD.dtype), None)
                part_TO.add_(linear(narrow_TR, up.to(hidden_TD.dtype), None), alpha=scale)
        return output_TO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Products are in the precision of the states, as those of a whole weight's gradient."""
        (grad_TO,) = grads
        hidden_TD, *factors = ctx.saved_tensors
        dtype, wants_hidden = grad_TO.dtype, ctx.needs_input_grad[0]
        grad_hidden = product(grad_TO, joined_weight(ctx.layers)) if wants_hidden else None
        slopes: list[Tensor | None] = []
        for grad, scale, (down, up) in zip(_split(grad_TO, ctx.layers), ctx.scales, _pairs(factors), strict=True):
            if down is None:
                slopes += [None, None]
                continue
            narrow_grad_TR = product(grad, up.to(dtype))
            if grad_hidden is not None:
                grad_hidden.add_(product(narrow_grad_TR, down.to(dtype)), alpha=scale)
            narrow_TR = product(hidden_TD, down.to(dtype).t())
            found = (product(narrow_grad_TR.t(), hidden_TD), product(grad.t(), narrow_TR))
            slopes += [slope.to(down.dtype) * scale for slope in found]
        return grad_hidden, None, None, None, *slopes


def _split(tensor_TO: Tensor, layers: Sequence[FourBitLinear]) -> tuple[Tensor, ...]:
    return torch.split(tensor_TO, [layer.out_features for layer in layers], dim=1)


def _pairs(factors: Sequence[Tensor | None]) -> list[tuple[Any, Any]]:
    """(A, B) of each layer; (None, None) where it has no adapter."""
    return list(zip(factors[::2], factors[1::2], strict=True))
