"""Products of few float8 rows with float8 weights, cut up so that the whole GPU reads weights (float8/tiles.py).

Every program multiplies a part of the inner dimension of one tile. Parts lie in float32 beside each other until a
second kernel adds them up in their order: bits depend on sizes alone, not on which program was first.
Owns: the product, its scales and its one rounding. Refuses: quantising (float8.py), atomics, autotuning.
Shapes: _T rows, _D inner width, _O outputs, _P parts.
"""
# Triton has no types, and its kernels are not Python functions.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from temper.models.float8.tiles import DEPTH, Tiles, steps_of

BLOCK = 512
"""Outputs of a program that adds up: 16 bytes of float32 for each thread and part."""


def few_rows_product(
    codes_TD: Tensor, scale_T1: Tensor, weight_OD: Tensor, scale_O: Tensor, bias_O: Tensor | None,
    dtype: torch.dtype, tiles: Tiles,
) -> Tensor:  # fmt: skip
    """(scale * codes) @ (scale * weight).T + bias, summed in float32 and rounded once to the dtype."""
    assert all(tensor.is_contiguous() for tensor in (codes_TD, weight_OD, scale_O))
    (num_rows, width), outputs = codes_TD.shape, len(weight_OD)
    output_TO = torch.empty(num_rows, outputs, dtype=dtype, device=codes_TD.device)
    if not num_rows:
        return output_TO
    is_whole = tiles.parts == 1
    sums_PTO = output_TO
    if not is_whole:
        sums_PTO = torch.empty(tiles.parts, num_rows, outputs, dtype=torch.float32, device=codes_TD.device)
    grid = (triton.cdiv(num_rows, tiles.rows), triton.cdiv(outputs, tiles.outputs), tiles.parts)
    steps = steps_of(width, tiles.parts)
    _multiply_part[grid](
        codes_TD, weight_OD, scale_T1, scale_O, bias_O, sums_PTO, num_rows, outputs, width, steps,
        ROW_TILE=tiles.rows, OUTPUT_TILE=tiles.outputs, DEPTH=DEPTH, IS_EVEN=width % DEPTH == 0, IS_WHOLE=is_whole,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if not is_whole:
        _add_parts[(num_rows, triton.cdiv(outputs, BLOCK))](
            sums_PTO, scale_T1, scale_O, bias_O, output_TO, num_rows, outputs, PARTS=tiles.parts, BLOCK=BLOCK
        )
    return output_TO


@triton.jit(do_not_specialize=["num_rows", "steps"])
def _multiply_part(
    codes, weight, row_scale, channel_scale, bias, target, num_rows, outputs, width, steps,
    ROW_TILE: tl.constexpr, OUTPUT_TILE: tl.constexpr, DEPTH: tl.constexpr,
    IS_EVEN: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Rows and outputs beyond the last one read the last one again, which costs no mask, and are not written."""
    row_R = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)
    output_O = tl.program_id(1) * OUTPUT_TILE + tl.arange(0, OUTPUT_TILE)
    part = tl.program_id(2)
    column_D = tl.arange(0, DEPTH)
    first = part * steps
    codes_RD = codes + first * DEPTH + tl.minimum(row_R, num_rows - 1)[:, None] * width + column_D[None, :]
    # 64 bits: outputs times width may pass 2**31.
    at_O = tl.minimum(output_O, outputs - 1).to(tl.int64) * width
    weight_DO = weight + first * DEPTH + at_O[None, :] + column_D[:, None]
    sum_RO = tl.zeros([ROW_TILE, OUTPUT_TILE], tl.float32)
    for step in range(first, tl.minimum(first + steps, (width + DEPTH - 1) // DEPTH)):
        if IS_EVEN:
            left, right = tl.load(codes_RD), tl.load(weight_DO)
        else:
            is_inside_D = column_D < width - step * DEPTH
            left = tl.load(codes_RD, mask=is_inside_D[None, :], other=0.0)
            right = tl.load(weight_DO, mask=is_inside_D[:, None], other=0.0)
        sum_RO = tl.dot(left, right, sum_RO)
        codes_RD += DEPTH
        weight_DO += DEPTH
    is_row_R, is_output_O = row_R < num_rows, output_O < outputs
    if IS_WHOLE:
        by_row_R = tl.load(row_scale + row_R, mask=is_row_R, other=0.0)
        by_channel_O = tl.load(channel_scale + output_O, mask=is_output_O, other=0.0)
        sum_RO = sum_RO * by_row_R[:, None] * by_channel_O[None, :]
        if bias is not None:
            sum_RO += tl.load(bias + output_O, mask=is_output_O, other=0.0).to(tl.float32)[None, :]
    place_RO = (part.to(tl.int64) * num_rows + row_R[:, None]) * outputs + output_O[None, :]
    tl.store(target + place_RO, sum_RO.to(target.dtype.element_ty), mask=is_row_R[:, None] & is_output_O[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _add_parts(
    sums, row_scale, channel_scale, bias, target, num_rows, outputs, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    output_O = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = output_O < outputs
    sum_O = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):  # unrolled: the loads wait together, the sums keep their order
        sum_O += tl.load(sums + (part * num_rows + row) * outputs + output_O, mask=mask, other=0.0)
    sum_O = sum_O * tl.load(row_scale + row) * tl.load(channel_scale + output_O, mask=mask, other=0.0)
    if bias is not None:
        sum_O += tl.load(bias + output_O, mask=mask, other=0.0).to(tl.float32)
    tl.store(target + row * outputs + output_O, sum_O.to(target.dtype.element_ty), mask=mask)
