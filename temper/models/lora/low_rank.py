"""What counts under a low-rank adapter, W + scale B A, rounded to W's precision, and linear layers that have one.

Engine and exports hold that weight; here the trainer multiplies by the very same one, so that a policy in bfloat16 is
the same policy on both sides. Owns: this arithmetic, linear layers' gradient, peft's layout of experts' factors.
Refuses: making adapters (wrapping.py), products of experts (expert_factors.py).
Shapes: _T packed tokens, _D width in, _O width out of all layers side by side, _R rank, _E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from temper.models.ops import Linear, product

ADAPTER = "default"
"""The name under which peft keeps the one adapter of a model."""


def is_adapted(module: Any) -> bool:
    """Whether this layer is peft's LoRA around a linear layer, or around one parameter of experts."""
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def weight_name(module: Any) -> str:
    """What the adapted weight is called in the layer inside."""
    return getattr(module, "parameter_name", "weight")


def base_weight(module: Any) -> Tensor:
    """The weight under the adapter. Adapters of several parameters of one layer lie one around the other."""
    return getattr(module.get_base_layer(), weight_name(module))  # type: ignore[no-any-return]


def merged_weight(module: Any, read: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Tensor:
    """W + scale B A as a tensor of its own, in W's precision. W is not touched. read: a whole tensor, where the module
    holds a part."""
    weight, scale = read(base_weight(module).detach()), module.scaling[ADAPTER]
    down, up = (read(factor[ADAPTER].weight.detach()) for factor in (module.lora_A, module.lora_B))
    if weight_name(module) != "weight":
        return merged_experts(weight, scale, *_by_expert(weight, down, up))
    return _Part(weight, None, scale).merged(down, up)


def split_factors(module: Any) -> tuple[Tensor, Tensor]:
    """Factors [E, R, D] and [E, O, R] of an adapter on experts; views."""
    return _by_expert(base_weight(module), module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight)


def _by_expert(weight_EOD: Tensor, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """peft stores the first expert by expert, the second rank by rank."""
    num_experts, num_out, width = weight_EOD.shape
    return down.view(num_experts, -1, width), up.view(num_out, -1, num_experts).permute(2, 0, 1)


def merged_experts(weight_EOD: Tensor, scale: float, down_ERD: Tensor, up_EOR: Tensor) -> Tensor:
    """W + scale B A of every expert, in W's precision."""
    wide = torch.baddbmm(weight_EOD.to(down_ERD.dtype), up_EOR, down_ERD, alpha=scale)
    return wide.to(weight_EOD.dtype)


def low_rank_linear(linear: Linear, hidden_TD: Tensor, modules: Sequence[Any]) -> Tensor:
    """Outputs of these layers side by side, adapted or not, as one product with their merged weights."""
    parts = [_Part.of(module) for module in modules]
    # By interface a peft layer can be switched off; then it is the layer inside.
    factors = [
        factor
        for module in modules
        for factor in (
            (module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight)
            if is_adapted(module) and not module.disable_adapters
            else (None, None)
        )
    ]
    return _LowRankLinear.apply(hidden_TD, linear, parts, *factors)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Part:
    """One layer. Weight and bias are frozen: only factors get gradients."""

    weight: Tensor
    bias: Tensor | None
    scale: float

    @staticmethod
    def of(module: Any) -> _Part:
        layer = module.base_layer if is_adapted(module) else module
        scale = module.scaling[ADAPTER] if is_adapted(module) else 0.0
        return _Part(layer.weight.detach(), None if layer.bias is None else layer.bias.detach(), scale)

    def merged(self, down: Tensor | None, up: Tensor | None) -> Tensor:
        if down is None or up is None:
            return self.weight
        return torch.addmm(self.weight.to(down.dtype), up, down, alpha=self.scale).to(self.weight.dtype)


class _LowRankLinear(torch.autograd.Function):
    """Merged weights live for one product and are made again for the gradient: kept, they would be a second model."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, linear: Linear, parts: list[_Part], *factors: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden_TD, *factors)
        ctx.parts = parts
        biases = [part.bias for part in parts if part.bias is not None]
        assert len(biases) in (0, len(parts)), "projections of one layer all have a bias or none has"
        return linear(hidden_TD, _joined(parts, factors), torch.cat(biases) if biases else None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The rounding of the merged weight is passed over, as for any weight that is rounded from a master.

        Products are in the precision of the states, as those of a whole weight's gradient: wider ones would cost more
        than the model's own.
        """
        (grad_TO,) = grads
        hidden_TD, *factors = ctx.saved_tensors
        parts: list[_Part] = ctx.parts
        grad_hidden = product(grad_TO, _joined(parts, factors)) if ctx.needs_input_grad[0] else None
        slopes: list[Tensor | None] = []
        for number, grad in enumerate(torch.split(grad_TO, [len(part.weight) for part in parts], dim=1)):
            down, up = factors[2 * number : 2 * number + 2]
            if down is None or not any(ctx.needs_input_grad[3 + 2 * number : 5 + 2 * number]):
                slopes += [None, None]
                continue
            narrow_grad_TR = product(grad, up.to(grad.dtype))
            narrow_TR = product(hidden_TD, down.to(grad.dtype).t())
            found = (product(narrow_grad_TR.t(), hidden_TD), product(grad.t(), narrow_TR))
            slopes += [slope.to(down.dtype) * parts[number].scale for slope in found]
        return grad_hidden, None, None, *slopes


def _joined(parts: Sequence[_Part], factors: Sequence[Tensor | None]) -> Tensor:
    merged = [part.merged(*factors[2 * number : 2 * number + 2]) for number, part in enumerate(parts)]
    return merged[0] if len(merged) == 1 else torch.cat(merged)
