"""The arithmetic of a decoder layer, by device and numerics: fused kernels on a GPU, torch elsewhere.

Owns: which function computes what. In `exact` mode no result of a row depends on the rows beside it.
Refuses: the order of operations (decoder.py) and attention.
Shapes: _T packed tokens, _D width, H heads, K kv-heads, _F width of the feed-forward layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from temper.models.exact import spelled_sigmoid, spelled_silu_mul, tiled_linear
from temper.models.experts.products import exact_products, grouped_products, looped_products, ordered_sum, weighted_sum
from temper.models.experts.routing import ordered_experts, top_experts

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """All differentiable; results have the dtype of the states."""

    linear: Linear
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x [..., D], weight, epsilon)."""
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    """(x, residual, weight, epsilon) -> norm of the sum, and the sum."""
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """(query [T, H, D], key [T, K, D], cos [T, D], sin [T, D])."""
    silu_mul: Callable[[Tensor], Tensor]
    """[T, 2F]: gate and up side by side -> [T, F]."""
    sigmoid: Callable[[Tensor], Tensor]
    choose: Callable[[Tensor, int], Tensor]
    """(scores of experts [T, E], how many) -> the best [T, K]."""
    grouped: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(rows [S, D] sorted by expert, weights [E, O, D], place behind the last row of each expert) -> [S, O]."""
    mix: Callable[[Tensor, Tensor], Tensor]
    """(what the experts of each token say [T, K, D], weights [T, K]) -> [T, D]."""


@cache
def ops_of(device: torch.device, numerics: str) -> Ops:
    is_exact = numerics == "exact"
    if device.type == "cuda":
        # Here: triton is there with a GPU only.
        from temper.models.kernels.norms import add_rms_norm as gpu_add_rms_norm
        from temper.models.kernels.norms import rms_norm as gpu_rms_norm
        from temper.models.kernels.products import exact_linear
        from temper.models.kernels.rope import rotate as gpu_rotate
        from temper.models.kernels.swiglu import silu_mul as gpu_silu_mul

        return Ops(
            linear=exact_linear if is_exact else functional.linear,
            rms_norm=gpu_rms_norm,
            add_rms_norm=gpu_add_rms_norm,
            rotate=gpu_rotate,
            silu_mul=gpu_silu_mul,
            sigmoid=torch.sigmoid,
            choose=ordered_experts if is_exact else top_experts,
            grouped=exact_products if is_exact else grouped_products,
            mix=ordered_sum if is_exact else weighted_sum,
        )
    return Ops(
        linear=tiled_linear if is_exact else cpu_linear,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        rotate=rotate,
        silu_mul=spelled_silu_mul if is_exact else silu_mul,
        sigmoid=spelled_sigmoid if is_exact else torch.sigmoid,
        choose=ordered_experts if is_exact else top_experts,
        grouped=partial(looped_products, tiled_linear if is_exact else cpu_linear),
        mix=ordered_sum if is_exact else weighted_sum,
    )


FEW_ROWS = 64
"""Up to so many OpenBLAS multiplies faster with the weights on the left: it repacks what stands on the right."""


def cpu_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if lacks_products(hidden):
        wide = cpu_linear(hidden.float(), weight.float(), None if bias is None else bias.float())
        return wide.to(hidden.dtype)
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    if has_mkl or len(hidden) > FEW_ROWS or torch.is_grad_enabled():
        return functional.linear(hidden, weight, bias)
    output = torch.mm(weight, hidden.t()).t()
    # What is much wider than its input, a gate, is next taken element by element, in any layout.
    output = output if len(weight) > 2 * weight.shape[1] else output.contiguous()
    return output if bias is None else output + bias


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right of two matrices of one dtype."""
    return (left.float() @ right.float()).to(left.dtype) if lacks_products(left) else left @ right


def lacks_products(tensor: Tensor) -> bool:
    """Without the instructions torch multiplies in half precision in loops that are hundreds of times slower than
    float32."""
    if tensor.is_cuda or tensor.dtype not in (torch.bfloat16, torch.float16):
        return False
    return not (has_bfloat16_products() if tensor.dtype is torch.bfloat16 else has_float16_products())


@cache
def has_bfloat16_products() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def has_float16_products() -> bool:
    """The same of float16."""
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()  # float64 too, as the modules do
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * normed.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    summed = residual + x
    return rms_norm(summed, weight, epsilon), summed


def rotate(query: Tensor, key: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos_TD.unsqueeze(1), sin_TD.unsqueeze(1)
    return query * cos + _rotate_half(query) * sin, key * cos + _rotate_half(key) * sin


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    gate, up = gate_up_T2F.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
