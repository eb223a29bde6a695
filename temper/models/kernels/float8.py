"""Rows of a matrix in float8, each with its own scale: one kernel, for a decode step would wait for five.

Owns: this, and how a kernel that makes rows (norms.py, swiglu.py) quantises them itself. Refuses: the product that
follows (float8_products.py). The spelled form in float8/arithmetic.py is the specification, to the bit.
"""
# Triton has no types, and its kernels are not Python functions.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def scale_of_largest(largest):
    return tl.maximum(tl.div_rn(largest, 448.0), 1e-12)


@triton.jit
def codes_of(x, inverse):
    """`inverse`: 1 / scale, one division a row. One for each number took longer than all else together."""
    return (x * inverse).to(tl.float8e4nv)


@triton.jit
def quantize_row(x_ptr, codes_ptr, scale_ptr, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # 64 bits: rows times width passes 2**31
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    scale = scale_of_largest(tl.max(tl.abs(x), axis=0))
    tl.store(codes_ptr + row * WIDTH + column, codes_of(x, tl.div_rn(1.0, scale)), mask=mask)
    tl.store(scale_ptr + row, scale)


def empty_rows(num_rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Codes and scales for a kernel to fill."""
    codes = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=device)
    return codes, torch.empty(num_rows, 1, dtype=torch.float32, device=device)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x / scale in float8, scale [rows, 1] in float32)."""
    x = x if x.stride(1) == 1 else x.contiguous()
    codes, scale = empty_rows(x.shape[0], x.shape[1], x.device)
    if x.numel():
        block = triton.next_power_of_2(x.shape[1])
        # 16 numbers a thread: rows of 64 sequences are too few for the GPU, so each has many warps.
        quantize_row[(x.shape[0],)](
            x, codes, scale, x.stride(0), WIDTH=x.shape[1], BLOCK=block, num_warps=max(1, min(16, block // 512))
        )
    return codes, scale
