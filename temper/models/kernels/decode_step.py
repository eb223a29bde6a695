"""A decode step of few rows in Triton: products that read weights fast, and what stands between them.

A decode step of a few rows waits for weights. A library's products read them at half of the memory's speed, and every
launch between two products leaves the memory idle. Here a product is cut along the inner dimension until it occupies
the whole GPU, and its parts are added up by the kernel that reads them next, a norm or a rotation, in a fixed order:
bits depend on sizes alone.
Owns: the kernels of a layer but attention's and experts'. Refuses: gradients, atomics, autotuning, many rows.
Shapes: _T rows, _D inner width, _O outputs, _F inner width of the feed-forward layer, _P parts; inside kernels _R rows
of a tile.
"""
# Triton has no types, and its kernels are not Python functions.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from temper.models.decode_step.tiles import OUTPUTS, StepTiles
from temper.models.kernels.chain import ChainRole, begin_in_chain, end_in_chain, fetch_ahead, launch_option
from temper.models.kernels.swiglu import gated


def product_parts(states_TD: Tensor, weight_OD: Tensor, tiles: StepTiles, role: ChainRole = ChainRole.NONE) -> Tensor:
    """states @ weight.T [P, T, O] in float32, still to be added up."""
    shape = tiles.parts, len(states_TD), len(weight_OD)
    sums_PTO = torch.empty(shape, dtype=torch.float32, device=states_TD.device)
    _launch(states_TD, weight_OD, sums_PTO, tiles, role, is_gated=False)
    return sums_PTO


def gated_product(states_TD: Tensor, gate_up_2FD: Tensor, tiles: StepTiles, role: ChainRole = ChainRole.NONE) -> Tensor:
    """silu(gate) * up [T, F] of states @ gate_up.T, rounded where separate steps would."""
    assert tiles.parts == 1, "a gate needs its whole sum"
    gated_TF = states_TD.new_empty((len(states_TD), len(gate_up_2FD) // 2))
    _launch(states_TD, gate_up_2FD, gated_TF, tiles, role, is_gated=True)
    return gated_TF


def add_norm(
    parts_PTD: Tensor | None, residual_TD: Tensor, weight_D: Tensor, epsilon: float, role: ChainRole = ChainRole.NONE
) -> tuple[Tensor, Tensor]:
    """(norm of the sum, the sum) of the residual and what these parts add up to; rounds as add_rms_norm does."""
    num_rows, width = residual_TD.shape
    assert residual_TD.is_contiguous()
    assert parts_PTD is None or parts_PTD.is_contiguous()
    normed_TD, summed_TD = torch.empty_like(residual_TD), torch.empty_like(residual_TD)
    block = triton.next_power_of_2(width)
    _add_norm[(num_rows,)](
        parts_PTD, residual_TD, weight_D, summed_TD, normed_TD, num_rows, epsilon,
        PARTS=0 if parts_PTD is None else len(parts_PTD), WIDTH=width, BLOCK=block, ROLE=role,
        num_warps=4 if block <= 2048 else 8, enable_fp_fusion=False, **launch_option(role),
    )  # fmt: skip
    return normed_TD, summed_TD


def rotate_and_store_parts(
    parts_PTO: Tensor, bias_O: Tensor | None, norms: tuple[Tensor, Tensor, float] | None,
    rotation: tuple[Tensor, Tensor], positions_T: Tensor, blocks_TM: Tensor, caches: tuple[Tensor, Tensor],
    role: ChainRole = ChainRole.NONE,
) -> Tensor:  # fmt: skip
    """The queries [T, H, D] of what these parts add up to, queries, keys and values side by side, rotated. Keys,
    rotated, and values go to their places in the caches [blocks, block size, K, D].

    norms: weights of queries' and keys' norms by head, and epsilon. rotation: cosines and sines of all positions.
    """
    keys, values = caches
    block_size, num_kv_heads, head_dim = keys.shape[1:]
    num_parts, num_rows, outputs = parts_PTO.shape
    num_heads = outputs // head_dim - 2 * num_kv_heads
    assert all(cache.stride()[2:] == (head_dim, 1) for cache in caches), "the heads of a place lie side by side"
    assert parts_PTO.is_contiguous()
    assert all(table.is_contiguous() for table in rotation)
    assert blocks_TM.stride(1) == 1
    query_THD = torch.empty((num_rows, num_heads, head_dim), dtype=keys.dtype, device=parts_PTO.device)
    query_norm, key_norm, epsilon = (None, None, 0.0) if norms is None else norms
    _rotate_and_store[(num_rows, num_heads + 2 * num_kv_heads)](
        parts_PTO, bias_O, query_norm, key_norm, *rotation, positions_T, blocks_TM, query_THD, keys, values, num_rows,
        blocks_TM.stride(0), *keys.stride()[:2], *values.stride()[:2], epsilon, PARTS=num_parts, HEADS=num_heads,
        KV_HEADS=num_kv_heads, HALF=head_dim // 2, BLOCK=triton.next_power_of_2(head_dim // 2), BLOCK_SIZE=block_size,
        ROLE=role, num_warps=1, enable_fp_fusion=False, **launch_option(role),
    )  # fmt: skip
    return query_THD


def _launch(
    states_TD: Tensor, weight_OD: Tensor, target: Tensor, tiles: StepTiles, role: ChainRole, *, is_gated: bool
) -> None:
    (num_rows, width), outputs = states_TD.shape, target.shape[-1]
    assert states_TD.is_contiguous()
    assert weight_OD.is_contiguous()
    assert num_rows <= tiles.rows
    _multiply_tile[(triton.cdiv(outputs, OUTPUTS), tiles.parts)](
        states_TD, weight_OD, target, num_rows, outputs, width, tiles.steps, ROWS=tiles.rows, OUTPUTS=OUTPUTS,
        DEPTH=tiles.depth, IS_GATED=is_gated, IS_EVEN=width % tiles.depth == 0, ROLE=role,
        IS_FETCHED=role is ChainRole.SMALL and width % 8 == 0, num_warps=4, num_stages=tiles.stages,
        **launch_option(role),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "steps"])
def _multiply_tile(
    states, weight, target, num_rows, outputs, width, steps, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr, IS_GATED: tl.constexpr, IS_EVEN: tl.constexpr, ROLE: tl.constexpr, IS_FETCHED: tl.constexpr,
):  # fmt: skip
    """One part of one tile of outputs, for all rows. Weights stand on the left, where tensor cores want 64 lines.

    Rows and outputs beyond the last one read the last one again, which costs no mask, and are not written."""
    output_O = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    part = tl.program_id(1)
    first = part * steps
    stop = tl.minimum(first + steps, (width + DEPTH - 1) // DEPTH)
    at_O = tl.minimum(output_O, outputs - 1).to(tl.int64) * width + first * DEPTH
    beyond = outputs.to(tl.int64) * width  # from a gate to its up
    if IS_FETCHED:
        num_bytes = (tl.minimum(stop * DEPTH, width) - first * DEPTH) * 2
        fetch_ahead(weight + at_O, num_bytes)
        if IS_GATED:
            fetch_ahead(weight + beyond + at_O, num_bytes)
    begin_in_chain(ROLE)
    row_R = tl.arange(0, ROWS)
    column_D = tl.arange(0, DEPTH)
    states_DR = states + tl.minimum(row_R, num_rows - 1)[None, :] * width + first * DEPTH + column_D[:, None]
    weight_OD = weight + at_O[:, None] + column_D[None, :]
    sum_OR = tl.zeros([OUTPUTS, ROWS], tl.float32)
    up_OR = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for step in range(first, stop):
        if IS_EVEN:
            left, right = tl.load(weight_OD), tl.load(states_DR)
        else:
            is_inside_D = column_D < width - step * DEPTH
            left = tl.load(weight_OD, mask=is_inside_D[None, :], other=0.0)
            right = tl.load(states_DR, mask=is_inside_D[:, None], other=0.0)
        sum_OR = tl.dot(left, right, sum_OR)
        if IS_GATED:
            if IS_EVEN:
                left = tl.load(weight_OD + beyond)
            else:
                left = tl.load(weight_OD + beyond, mask=is_inside_D[None, :], other=0.0)
            up_OR = tl.dot(left, right, up_OR)
        states_DR += DEPTH
        weight_OD += DEPTH
    end_in_chain(ROLE)
    is_real_OR = (output_O < outputs)[:, None] & (row_R < num_rows)[None, :]
    place_OR = (part.to(tl.int64) * num_rows + row_R[None, :]) * outputs + output_O[:, None]
    dtype = target.dtype.element_ty
    result_OR = gated(sum_OR.to(dtype), up_OR.to(dtype)) if IS_GATED else sum_OR
    tl.store(target + place_OR, result_OR, mask=is_real_OR)


@triton.jit(do_not_specialize=["num_rows"])
def _add_norm(
    parts, residual, weight, summed, normed, num_rows, epsilon, PARTS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, ROLE: tl.constexpr,
):  # fmt: skip
    dtype = residual.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column_D = tl.arange(0, BLOCK)
    mask = column_D < WIDTH
    begin_in_chain(ROLE)
    x_D = tl.load(residual + row * WIDTH + column_D, mask=mask, other=0.0).to(tl.float32)
    if PARTS > 0:
        said_D = added(parts + row * WIDTH + column_D, None, num_rows * WIDTH, mask, dtype, PARTS)
        x_D = (said_D + x_D).to(dtype).to(tl.float32)
    tl.store(summed + row * WIDTH + column_D, x_D.to(dtype), mask=mask)
    scale = tl.rsqrt(tl.sum(x_D * x_D, 0) / WIDTH + epsilon)
    tl.store(normed + row * WIDTH + column_D, weighed(x_D * scale, weight + column_D, mask, dtype), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "table_row"], do_not_specialize_on_alignment=["positions", "table"])
def _rotate_and_store(
    parts, bias, query_norm, key_norm, cos, sin, positions, table, query, keys, values, num_rows, table_row,
    key_block, key_slot, value_block, value_slot, epsilon, PARTS: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROLE: tl.constexpr,
):  # fmt: skip
    """One head of one row: queries' heads first, then keys', then values'."""
    dtype = query.dtype.element_ty
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    mask = column < HALF
    begin_in_chain(ROLE)
    place = head * (2 * HALF) + column
    outputs = (HEADS + 2 * KV_HEADS) * 2 * HALF
    first, stride = parts + row * outputs + place, num_rows.to(tl.int64) * outputs
    low = added(first, None if bias is None else bias + place, stride, mask, dtype, PARTS)
    high = added(first + HALF, None if bias is None else bias + HALF + place, stride, mask, dtype, PARTS)
    position = tl.load(positions + row).to(tl.int64)
    if head < HEADS + KV_HEADS:
        if query_norm is not None:
            scale = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / (2 * HALF) + epsilon)
            norm = query_norm
            if head >= HEADS:
                norm = key_norm
            low = weighed(low * scale, norm + column, mask, dtype).to(tl.float32)
            high = weighed(high * scale, norm + HALF + column, mask, dtype).to(tl.float32)
        angle = position * (2 * HALF) + column
        cos_low = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
        cos_high = tl.load(cos + angle + HALF, mask=mask, other=0.0).to(tl.float32)
        sin_low = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
        sin_high = tl.load(sin + angle + HALF, mask=mask, other=0.0).to(tl.float32)
        low, high = low * cos_low - high * sin_low, high * cos_high + low * sin_high
    if head < HEADS:
        target = query + (row * HEADS + head) * (2 * HALF) + column
    else:
        block = tl.load(table + row * table_row + position // BLOCK_SIZE).to(tl.int64)
        slot = position % BLOCK_SIZE
        if head < HEADS + KV_HEADS:
            target = keys + block * key_block + slot * key_slot + (head - HEADS) * (2 * HALF) + column
        else:
            target = values + block * value_block + slot * value_slot + (head - HEADS - KV_HEADS) * (2 * HALF) + column
    tl.store(target, low.to(dtype), mask=mask)
    tl.store(target + HALF, high.to(dtype), mask=mask)


@triton.jit
def weighed(normed, weight, mask, dtype):
    """Rounded before the weight and behind it, as rms_norm does."""
    wide = normed.to(dtype).to(tl.float32) * tl.load(weight, mask=mask, other=0.0).to(dtype).to(tl.float32)
    return wide.to(dtype)


@triton.jit
def added(part, bias, stride, mask, dtype, PARTS: tl.constexpr):
    """The sum of the parts and of the bias, if there is one, rounded once, as a product's output would be."""
    total = tl.load(part, mask=mask, other=0.0).to(tl.float32)
    for index in tl.static_range(1, PARTS):
        total += tl.load(part + index * stride, mask=mask, other=0.0)
    if bias is not None:
        total += tl.load(bias, mask=mask, other=0.0).to(tl.float32)
    return total.to(dtype).to(tl.float32)
