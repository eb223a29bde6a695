"""RMS norm of packed rows, alone or after a residual addition, with gradients: Llama's rounding, float32 inside.

Owns: both norms, and their rows in float8 for the product that follows. Refuses: atomics, autotuning and blocks
chosen by the number of rows, so that a row's result depends on that row and its width alone.
Shapes: T packed tokens, H heads, D width.
"""
# Triton has no types, and its kernels are not Python functions.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from temper.models.kernels.float8 import codes_of, empty_rows, scale_of_largest

TILES = 16
"""Tiles that one program of the backward pass adds up before it writes its part of the weight's gradient."""


@triton.jit
def scale_of(x, epsilon, WIDTH: tl.constexpr):
    return tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + epsilon)[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def norm_rows(
    x_ptr, residual_ptr, weight_ptr, summed_ptr, normed_ptr, float8_scale_ptr, num_rows, outer, inner, epsilon,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """With a place for scales, `normed` is float8: quantised from what would have been written otherwise."""
    dtype = x_ptr.dtype.element_ty
    # 64 bits: rows times stride passes 2**31 in long batches.
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (column < WIDTH)
    x = tl.load(x_ptr + (row // HEADS) * outer + (row % HEADS) * inner + column, mask=mask, other=0.0).to(tl.float32)
    place = row * WIDTH + column
    if residual_ptr is not None:
        x = (x + tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)).to(dtype)
        tl.store(summed_ptr + place, x, mask=mask)
        x = x.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(dtype).to(tl.float32)
    normed = (x * scale_of(x, epsilon, WIDTH)).to(dtype).to(tl.float32)
    normed = (normed * weight).to(dtype)
    if float8_scale_ptr is not None:
        wide = normed.to(tl.float32)
        scale = scale_of_largest(tl.max(tl.abs(wide), axis=1))[:, None]
        tl.store(float8_scale_ptr + row, scale, mask=row < num_rows)
        # As many a thread as there are 16 bytes of before: wider stores would divide the row, and with it the order of
        # the sum, in another way, and these codes would not be those of the row that is written otherwise.
        target = tl.max_contiguous(normed_ptr + place, (1, 128 // dtype.primitive_bitwidth))
        tl.store(target, codes_of(wide, tl.div_rn(1.0, scale)), mask=mask)
    else:
        tl.store(normed_ptr + place, normed, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def norm_rows_backward(
    x_ptr, weight_ptr, grad_normed_ptr, grad_summed_ptr, grad_x_ptr, partial_ptr, num_rows, outer, inner, epsilon,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    dtype = x_ptr.dtype.element_ty
    column = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(dtype).to(tl.float32)
    partial = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    start = tl.program_id(0).to(tl.int64) * (ROWS * COUNT)
    for tile in range(COUNT):
        row = (start + tile * ROWS + tl.arange(0, ROWS))[:, None]
        mask = (row < num_rows) & (column < WIDTH)
        source = x_ptr + (row // HEADS) * outer + (row % HEADS) * inner + column
        x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        place = row * WIDTH + column
        grad = tl.load(grad_normed_ptr + place, mask=mask, other=0.0).to(tl.float32)
        scale = scale_of(x, epsilon, WIDTH)
        normed = x * scale
        partial += grad * normed.to(dtype).to(tl.float32)
        grad = grad * weight
        grad_x = scale * (grad - normed * (tl.sum(grad * normed, axis=1) / WIDTH)[:, None])
        if grad_summed_ptr is not None:
            grad_x += tl.load(grad_summed_ptr + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + place, grad_x.to(dtype), mask=mask)
    target = partial_ptr + tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, BLOCK)
    tl.store(target, tl.sum(partial, axis=0), mask=tl.arange(0, BLOCK) < WIDTH)


@cache
def launch_options(width: int) -> dict[str, Any]:
    """Blocks for rows of one width: 16 bytes per thread and load, small rows (heads) several to a program."""
    block = triton.next_power_of_2(width)
    # Products and sums stay apart: fused ones would round differently wherever the compiler happens to fuse them.
    return {
        "WIDTH": width, "BLOCK": block, "ROWS": max(1, 1024 // block),
        "num_warps": 4 if block <= 1024 else 8 if block <= 4096 else 16, "enable_fp_fusion": False,
    }  # fmt: skip


def addressed(x: Tensor) -> tuple[Tensor, int, int, int]:
    """x [T, D] or [T, H, D] as (tensor, heads, stride of a token, stride of a head).

    Triton chooses vector sizes, and with them the order of a sum, by alignment. Whatever is aligned in another way
    than a fresh tensor of this width is copied: the same row must give the same bits wherever it lies.
    """
    width, is_heads = x.shape[-1], x.dim() == 3
    if not x.is_contiguous():
        strides = x.stride()
        if x.data_ptr() % 16 == 0 and strides[-1] == 1 and not any(n % 16 for n in (width, *strides[:-1])):
            return x, x.shape[1] if is_heads else 1, strides[0], strides[1] if is_heads else 0
        return x.contiguous(), 1, width, 0
    return aligned(x), 1, width, 0


def aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def forward(x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor | None]:
    x, heads, outer, inner = addressed(x) if residual is None else (aligned(x), 1, x.shape[-1], 0)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    summed = None if residual is None else torch.empty_like(normed)
    num_rows, options = x.numel() // x.shape[-1], launch_options(x.shape[-1])
    if num_rows:
        norm_rows[(triton.cdiv(num_rows, options["ROWS"]),)](
            x, None if residual is None else aligned(residual), aligned(weight), summed, normed, None,
            num_rows, outer, inner, epsilon, HEADS=heads, **options,
        )  # fmt: skip
    return normed, summed


def backward(
    x: Tensor, weight: Tensor, epsilon: float, grad_normed: Tensor, grad_summed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(gradient of x, gradient of the weight). The scale is computed anew: cheaper than to store it and read it."""
    x, heads, outer, inner = addressed(x)
    num_rows, options = x.numel() // x.shape[-1], launch_options(x.shape[-1])
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    groups = triton.cdiv(num_rows, options["ROWS"] * TILES)
    partial = torch.empty(groups, x.shape[-1], dtype=torch.float32, device=x.device)
    if num_rows:
        norm_rows_backward[(groups,)](
            x, aligned(weight), aligned(grad_normed), None if grad_summed is None else aligned(grad_summed),
            grad_x, partial, num_rows, outer, inner, epsilon, HEADS=heads, COUNT=TILES, **options,
        )  # fmt: skip
    return grad_x, partial.sum(0).to(weight.dtype)


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.epsilon = epsilon
        return forward(x, None, weight, epsilon)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_normed: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return *backward(x, weight, ctx.epsilon, grad_normed, None), None


class AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        normed, summed = forward(x, residual, weight, epsilon)
        assert summed is not None
        ctx.save_for_backward(summed, weight)
        ctx.epsilon = epsilon
        ctx.set_materialize_grads(False)
        return normed, summed

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_normed: Tensor | None, grad_summed: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        summed, weight = ctx.saved_tensors
        if grad_normed is None:
            return grad_summed, grad_summed, None, None
        grad, grad_weight = backward(summed, weight, ctx.epsilon, grad_normed, grad_summed)
        return grad, grad, grad_weight, None


def rms_norm(x_TD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon), rounded to x's dtype, times the weight, rounded again. Also for x [T, H, D]."""
    if torch.is_grad_enabled() and (x_TD.requires_grad or weight_D.requires_grad):
        return Norm.apply(x_TD, weight_D, epsilon)
    return forward(x_TD, None, weight_D, epsilon)[0]


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(norm of the sum, the sum): summed = residual + x, rounded to the dtype before it is normalised."""
    needs_grad = x_TD.requires_grad or residual_TD.requires_grad or weight_D.requires_grad
    if torch.is_grad_enabled() and needs_grad:
        return AddNorm.apply(x_TD, residual_TD, weight_D, epsilon)
    normed, summed = forward(x_TD, residual_TD, weight_D, epsilon)
    assert summed is not None
    return normed, summed


def add_rms_norm_float8(
    x_TD: Tensor | None, residual_TD: Tensor, weight_D: Tensor, epsilon: float
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """((codes, scales) of what add_rms_norm gives, the sum), without gradient. No x: of the residual alone."""
    num_rows, width = residual_TD.shape
    codes, scale = empty_rows(num_rows, width, residual_TD.device)
    options = launch_options(width)
    x, residual, summed = aligned(residual_TD), None, None
    if x_TD is not None:
        x, residual, summed = aligned(x_TD), x, torch.empty_like(x)
    if num_rows:
        norm_rows[(triton.cdiv(num_rows, options["ROWS"]),)](
            x, residual, aligned(weight_D), summed, codes, scale, num_rows, width, 0, epsilon, HEADS=1, **options
        )
    return (codes, scale), residual_TD if summed is None else summed
