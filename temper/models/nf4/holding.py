"""Which layers of a model are held in 4 bits, and the way back to ordinary ones.

Owns: both, a layer at a time. Refuses: families that Temper does not walk layer by layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from temper.errors import UserError
from temper.models.decoder import FAMILIES, is_dense
from temper.models.nf4.layers import FourBitLinear


def require_family(family: str) -> None:
    """UserError for a family that cannot be held in 4 bits. By model_type, before weights are read."""
    if family not in FAMILIES:
        raise _refusal(family)


def _refusal(family: str) -> UserError:
    return UserError(
        f'model.lora.base="4bit" is made for the families {", ".join(FAMILIES)} with SiLU, and this model is a '
        f'{family}. Use base = "full"'
    )


@torch.no_grad()
def hold_in_four_bits(model: Any, device: torch.device) -> nn.Module:
    """Moves the model to the device with the linear layers of its decoder in 4 bits. Changes it in place.

    Each weight is moved, quantised and let go by itself: on the device the model never exists in full. Embeddings,
    norms, biases and the head keep their precision.
    """
    if not is_dense(model):
        raise _refusal(model.config.get_text_config().model_type)
    layers = model.get_decoder().layers
    for name in [name for name, module in layers.named_modules() if type(module) is nn.Linear]:
        linear: Any = layers.get_submodule(name)
        bias = None if linear.bias is None else linear.bias.to(device)
        layers.set_submodule(name, FourBitLinear(linear.weight.to(device), bias))
    return model.to(device)  # type: ignore[no-any-return]


@torch.no_grad()
def hold_in_full(model: Any) -> nn.Module:
    """The same model with ordinary layers that have the dequantised weights. Changes it in place."""
    for name, layer in [(n, m) for n, m in model.named_modules() if isinstance(m, FourBitLinear)]:
        model.set_submodule(name, whole_linear(layer.weight, layer.bias))
    return model  # type: ignore[no-any-return]


def whole_linear(weight: torch.Tensor, bias: nn.Parameter | None) -> nn.Linear:
    linear = nn.Linear(1, 1, bias=False, device="meta")
    linear.out_features, linear.in_features = weight.shape
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.bias = bias  # type: ignore[assignment]
    return linear
