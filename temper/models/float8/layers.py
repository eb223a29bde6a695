"""A sampler's model whose decoder layers hold their matrices in float8.

Owns: which matrices, where they lie, taking over new weights, and what of them can be compared. Refuses: families that
are not walked layer by layer (decoder.py); embedding, norms, biases and head, which stay as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from temper.models.float8.arithmetic import FLOAT8, float8_linear, quantize_rows

MATRICES = {
    "self_attn": (("q_proj", "k_proj", "v_proj"), ("o_proj",)),
    "mlp": (("gate_proj", "up_proj"), ("down_proj",)),
}
"""Of a decoder layer. Those in one group are computed together."""


class Float8Linear(nn.Module):
    """A linear layer for inference. Buffers, not parameters: nothing here is trained."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: nn.Parameter | None) -> None:
        """weight [out, in] in float8, scale [out] in float32: memory to be filled by take()."""
        super().__init__()
        self.weight: Tensor
        self.scale: Tensor
        self.register_buffer("weight", weight)
        # Made from what is published, so it belongs to no checkpoint.
        self.register_buffer("scale", scale, persistent=False)
        self.bias = bias

    @torch.no_grad()
    def take(self, weight: Tensor) -> None:
        """Quantises a published weight into the memory that is there: recorded decode steps go on reading it."""
        rows, scale = quantize_rows(weight.to(self.weight.device))
        self.weight.copy_(rows)
        self.scale.copy_(scale[:, 0])

    def forward(self, hidden_TD: Tensor) -> Tensor:
        return float8_linear(hidden_TD, self.weight, self.scale, self.bias)


def float8_copy(model: Any) -> nn.Module:
    """The model's tree of modules with the matrices of its decoder layers in float8. Everything else is shared."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    tree: Any = copy.deepcopy(model, shared)
    for layer in tree.get_decoder().layers:
        for owner, groups in MATRICES.items():
            for names in groups:
                _replace(getattr(layer, owner), names)
    return tree  # type: ignore[no-any-return]


def _replace(module: Any, names: Sequence[str]) -> None:
    """Projections that are computed together lie end to end, and so do their scales."""
    linears = [getattr(module, name) for name in names]
    sizes = [linear.out_features for linear in linears]
    device = linears[0].weight.device
    weights = torch.split(torch.empty(sum(sizes), linears[0].in_features, dtype=FLOAT8, device=device), sizes)
    scales = torch.split(torch.empty(sum(sizes), device=device), sizes)
    for name, linear, weight, scale in zip(names, linears, weights, scales, strict=True):
        quantized = Float8Linear(weight, scale, linear.bias)
        quantized.take(linear.weight)
        setattr(module, name, quantized)


def float8_names(model: Any) -> frozenset[str]:
    """Names under which the matrices are published that float8_copy() of this model holds in float8."""
    layers = {id(layer) for layer in model.get_decoder().layers}
    return frozenset(
        f"{place}.{owner}.{name}.weight"
        for place, module in model.named_modules()
        if id(module) in layers
        for owner, groups in MATRICES.items()
        for group in groups
        for name in group
    )


def float8_layers(model: nn.Module) -> dict[str, Float8Linear]:
    """By the name of their weight; empty for a model that holds none."""
    return {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, Float8Linear)}


def held_bits(model: nn.Module, others: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """What a model holds, for comparison with published_bits: float8 weights as bytes beside their scales, and those of
    the other tensors that are no float8."""
    layers = float8_layers(model)
    bits = {name: layer.weight.view(torch.uint8) for name, layer in layers.items()}
    scales = {_scale_name(name): layer.scale for name, layer in layers.items()}
    return {name: tensor for name, tensor in others.items() if name not in layers} | bits | scales


def published_bits(published: Mapping[str, Tensor], model: nn.Module) -> Mapping[str, Tensor]:
    """What such a model should hold of a publication. Each is made when it is asked for: never all of them."""
    makers: dict[str, Callable[[], Tensor]] = {}
    layers = float8_layers(model)
    for name in published:
        if name not in layers:
            makers[name] = lambda name=name: published[name]  # type: ignore[misc]
            continue
        makers[name] = lambda name=name: quantize_rows(published[name])[0].view(torch.uint8)  # type: ignore[misc]
        makers[_scale_name(name)] = lambda name=name: quantize_rows(published[name])[1][:, 0]  # type: ignore[misc]
    return _MadeWhenAsked(makers)


def _scale_name(name: str) -> str:
    return name.removesuffix("weight") + "scale"


class _MadeWhenAsked(Mapping[str, Tensor]):
    def __init__(self, makers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> Tensor:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)
