"""Linear layers whose frozen weight is held in 4 bits.

Owns: the layer, and making weights of several of them for one product. Refuses: choosing which layers (holding.py), and
the product itself (products.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from temper.models.nf4.blocks import dequantise, quantise


class FourBitLinear(nn.Linear):
    """An nn.Linear to whoever looks at it (peft does), but `weight` is made anew each time it is read."""

    codes: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Quantises on the weight's device."""
        nn.Module.__init__(self)  # not nn.Linear's, which would make a weight
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        codes, scales = quantise(weight)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight that counts, in the model's precision: a tensor of the caller's own."""
        return joined_weight([self])


def joined_weight(layers: Sequence[FourBitLinear]) -> Tensor:
    """The weights of these layers one below the other, made in place: no copy beside it."""
    first = layers[0]
    rows = [layer.out_features for layer in layers]
    joined = torch.empty(sum(rows), first.in_features, dtype=first.dtype, device=first.codes.device)
    with torch.no_grad():
        for layer, part in zip(layers, torch.split(joined, rows), strict=True):
            dequantise(layer.codes, layer.scales, part)
    return joined


def four_bit_sizes(model: nn.Module) -> dict[str, int]:
    """How many parameters the weights in 4 bits stand for, by name: no list of a model's parameters has them."""
    return {
        f"{name}.weight": module.in_features * module.out_features
        for name, module in model.named_modules()
        if isinstance(module, FourBitLinear)
    }


def holds_four_bits(model: nn.Module) -> bool:
    return any(isinstance(module, FourBitLinear) for module in model.modules())
