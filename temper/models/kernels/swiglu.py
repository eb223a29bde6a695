"""silu(gate) * up of packed rows, joined or apart, with gradients: Hugging Face's two roundings, float32 inside.

Owns: both forms, one kernel each way, and rows in float8 for the product that follows. Refuses: a copy of either half
of a joined tensor.
Shapes: T packed tokens, F inner width, 2F gate and up side by side.
"""
# Triton has no types, and its kernels are not Python functions.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from temper.models.kernels.float8 import codes_of, empty_rows, scale_of_largest

BLOCK = 1024
"""Columns of one program: 128 threads with 8 elements, 16 bytes of bf16, each."""

OPTIONS: dict[str, Any] = {"BLOCK": BLOCK, "num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def gated(gate, up):
    """In the dtype of both. The quotient may be off by 2 in the last of 24 bits: an exact one takes three times the
    instructions, and a kernel that should wait for memory would compute for longer."""
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    return (silu * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def silu_mul_rows(
    gate_ptr, up_ptr, out_ptr, gate_stride, up_stride,
    WIDTH: tl.constexpr, UP_AT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # 64 bits: rows times width passes 2**31 in long batches
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0)
    up = tl.load(up_ptr + row * up_stride + UP_AT + column, mask=mask, other=0.0)
    tl.store(out_ptr + row * WIDTH + column, gated(gate, up), mask=mask)


@triton.jit
def silu_mul_float8_row(
    gate_up_ptr, codes_ptr, scale_ptr, stride, WIDTH: tl.constexpr, FRONT: tl.constexpr, REST: tl.constexpr
):
    """A whole row, because its scale needs its largest entry. In two blocks: one that holds 18,944 is 32,768 wide."""
    row = tl.program_id(0).to(tl.int64)
    gate_ptr, codes_ptr = gate_up_ptr + row * stride, codes_ptr + row * WIDTH
    column = tl.arange(0, FRONT)
    front = gated(tl.load(gate_ptr + column), tl.load(gate_ptr + WIDTH + column))
    largest = tl.max(tl.abs(front.to(tl.float32)), axis=0)
    if REST > 0:
        beyond = FRONT + tl.arange(0, REST)
        gate = tl.load(gate_ptr + beyond, mask=beyond < WIDTH, other=0.0)
        rest = gated(gate, tl.load(gate_ptr + WIDTH + beyond, mask=beyond < WIDTH, other=0.0))
        largest = tl.maximum(largest, tl.max(tl.abs(rest.to(tl.float32)), axis=0))
    scale = scale_of_largest(largest)
    inverse = tl.div_rn(1.0, scale)
    tl.store(scale_ptr + row, scale)
    tl.store(codes_ptr + column, codes_of(front.to(tl.float32), inverse))
    if REST > 0:
        tl.store(codes_ptr + beyond, codes_of(rest.to(tl.float32), inverse), mask=beyond < WIDTH)


@triton.jit
def silu_mul_rows_backward(
    gate_ptr, up_ptr, grad_ptr, grad_gate_ptr, grad_up_ptr, gate_stride, up_stride, grad_stride,
    WIDTH: tl.constexpr, UP_AT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    dtype = gate_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + UP_AT + column, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.div_rn(1.0, 1.0 + tl.exp(-gate))
    silu = (gate * sigmoid).to(dtype).to(tl.float32)
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(grad_gate_ptr + row * grad_stride + column, (grad * up * slope).to(dtype), mask=mask)
    tl.store(grad_up_ptr + row * grad_stride + UP_AT + column, (grad * silu).to(dtype), mask=mask)


def with_whole_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def forward(gate: Tensor, up: Tensor, width: int, up_at: int) -> Tensor:
    """`up` starts at column `up_at`: a joined tensor is passed twice, which costs no views."""
    gate, up = with_whole_rows(gate), with_whole_rows(up)
    out = torch.empty(gate.shape[0], width, dtype=gate.dtype, device=gate.device)
    if out.numel():
        silu_mul_rows[(gate.shape[0], triton.cdiv(width, BLOCK))](
            gate, up, out, gate.stride(0), up.stride(0), WIDTH=width, UP_AT=up_at, **OPTIONS
        )
    return out


def backward(gate: Tensor, up: Tensor, grad: Tensor, width: int, up_at: int) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up; of a joined tensor twice the one joined gradient."""
    gate, up = with_whole_rows(gate), with_whole_rows(up)
    grad_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grad_up = torch.empty_like(grad_gate) if up_at == 0 else grad_gate
    if grad_gate.numel():
        silu_mul_rows_backward[(gate.shape[0], triton.cdiv(width, BLOCK))](
            gate, up, grad.contiguous(), grad_gate, grad_up, gate.stride(0), up.stride(0), grad_gate.stride(0),
            WIDTH=width, UP_AT=up_at, **OPTIONS,
        )  # fmt: skip
    return grad_gate, grad_up


class SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        width = gate_up.shape[1] // 2
        return forward(gate_up, gate_up, width, width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        width = gate_up.shape[1] // 2
        return backward(gate_up, gate_up, grad, width, width)[0]


class SiluMulPair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return forward(gate, up, gate.shape[1], 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return backward(gate, up, grad, gate.shape[1], 0)


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """silu(first half) rounded to the dtype, times the second half, rounded again: [T, 2F] -> [T, F]."""
    if torch.is_grad_enabled() and gate_up_T2F.requires_grad:
        return SiluMul.apply(gate_up_T2F)
    width = gate_up_T2F.shape[1] // 2
    return forward(gate_up_T2F, gate_up_T2F, width, width)


def silu_mul_pair(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """The same for two tensors."""
    if torch.is_grad_enabled() and (gate_TF.requires_grad or up_TF.requires_grad):
        return SiluMulPair.apply(gate_TF, up_TF)
    return forward(gate_TF, up_TF, gate_TF.shape[1], 0)


def silu_mul_float8(gate_up_T2F: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scales) of what silu_mul gives, without gradient."""
    gate_up_T2F = with_whole_rows(gate_up_T2F)
    num_rows, width = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    codes, scale = empty_rows(num_rows, width, gate_up_T2F.device)
    front = 1 << (width.bit_length() - 1)
    rest = triton.next_power_of_2(width - front) if width > front else 0
    if num_rows:
        silu_mul_float8_row[(num_rows,)](
            gate_up_T2F, codes, scale, gate_up_T2F.stride(0), WIDTH=width, FRONT=front, REST=rest,
            num_warps=max(1, min(16, front // 512)), enable_fp_fusion=False,
        )  # fmt: skip
    return codes, scale
