"""Rows of a matrix in float8, each with its own scale: one kernel, for a decode step would wait for five.

Owns: this. Refuses: the product that follows (float8/arithmetic.py), whose spelled form is the specification.
"""
# Triton has no types, and its kernels are not Python functions.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def quantize_row(x_ptr, out_ptr, scale_ptr, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # 64 bits: rows times width passes 2**31
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), axis=0), 448.0), 1e-12)
    scaled = tl.minimum(tl.maximum(tl.div_rn(x, scale), -448.0), 448.0)
    tl.store(out_ptr + row * WIDTH + column, scaled.to(tl.float8e4nv), mask=mask)
    tl.store(scale_ptr + row, scale)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x / scale in float8, scale [rows, 1] in float32)."""
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    if x.numel():
        block = triton.next_power_of_2(x.shape[1])
        quantize_row[(x.shape[0],)](
            x, out, scale, x.stride(0), WIDTH=x.shape[1], BLOCK=block, num_warps=4 if block <= 4096 else 16
        )
    return out, scale
