"""Weights from their 4-bit codes, for a product that follows at once.

Owns: the kernel. Refuses: the format (nf4/blocks.py), whose bits these are on every device.
Shapes: _B blocks of one program, _C codes of a block: a byte with two values.
"""
# Triton has no types, and its kernels are not Python functions.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCKS = 32
"""Blocks of one program: 1,024 bytes of codes, 2,048 values."""


def dequantise_blocks(codes_BC: Tensor, scales_B: Tensor, levels: Tensor, out: Tensor) -> None:
    """Writes level x scale, in float32 and rounded once, to `out`, which may end inside the last block."""
    num_blocks, half = codes_BC.shape
    assert codes_BC.is_contiguous()
    assert out.is_contiguous()
    if num_blocks:
        _dequantise_kernel[(triton.cdiv(num_blocks, BLOCKS),)](
            codes_BC, scales_B, levels, out, num_blocks, out.numel(), HALF=half, BLOCKS=BLOCKS, num_warps=4
        )


@triton.jit
def _dequantise_kernel(
    codes, scales, levels, out, num_blocks, num_values, HALF: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    block_B = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    place_C = tl.arange(0, HALF)
    is_block_B = block_B < num_blocks
    code_BC = tl.load(codes + block_B[:, None] * HALF + place_C[None, :], mask=is_block_B[:, None], other=0).to(
        tl.int32
    )
    scale_B1 = tl.load(scales + block_B, mask=is_block_B, other=0.0).to(tl.float32)[:, None]
    lower_BC = tl.load(levels + (code_BC & 15)) * scale_B1
    upper_BC = tl.load(levels + (code_BC >> 4)) * scale_B1
    target_BC = block_B[:, None] * (2 * HALF) + place_C[None, :]
    dtype = out.dtype.element_ty
    tl.store(out + target_BC, lower_BC.to(dtype), mask=target_BC < num_values)
    tl.store(out + target_BC + HALF, upper_BC.to(dtype), mask=target_BC + HALF < num_values)
