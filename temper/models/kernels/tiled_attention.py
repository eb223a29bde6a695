"""Attention over paged or packed keys in Triton: one sweep over key tiles serves prefill, decode and the trainer.

Owns: the kernels, and the promise that `paged_attention` and `packed_attention` give a query the same bits however it
is batched, chunked or stored. Refuses: writing the cache; host synchronisation (grids depend on shapes only).
Shapes: _T tokens, N rows, H heads, K kv-heads, G = H / K heads per kv-head, D head size, L keys of a tile, M table
width; inside kernels _R lines of a tile, a line being one (query, head of the group) pair.
"""
# Triton has no types, and its kernels are not Python functions.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from temper.models.kernels.chain import ChainRole, begin_in_chain, end_in_chain, launch_option

EXACT_LINES = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 16}
"""Lines of a tile in `paged_attention` and `packed_attention`, always. 64 lines are the least a Hopper warp group
multiplies at once; fewer would use another instruction, whose sums need not have the same bits. Tensor cores do not
multiply float32, and 64 lines of it do not fit into registers."""
DECODE_LINES = 16
"""Lines of a tile in `decode_attention`: the least that tensor cores take. Its bits are its own."""
TILE_KEYS = 64
"""Keys per iteration. Tiles start at multiples of it, so a key always meets the same neighbours."""
LEAST_KEYS_PER_SPLIT = 256
MANY_PROGRAMS = 256
"""About two for each multiprocessor of a large GPU."""
MOST_SPLITS = 64
_UNLIMITED = 2**30
_LOG2_E = 1.4426950408889634

Recompute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query, key, value) -> output: any differentiable attention over the same rows."""


def paged_attention(
    query_THD: Tensor, key_cache: Tensor, value_cache: Tensor, blocks_NM: Tensor, query_starts_N1: Tensor,
    positions_N: Tensor, *, scaling: float, sliding_window: int | None, longest_query: int,
) -> Tensor:  # fmt: skip
    """Causal attention of each row's chunk of queries over the keys in its blocks, those of the chunk included.

    Row n owns queries query_starts[n] to query_starts[n + 1], the first at position positions[n]; it may own none.
    Caches are [num_blocks, block_size, K, D]. `longest_query` is an upper bound of the chunks' lengths. With a window
    a query sees itself and the sliding_window - 1 keys before it. Output of tokens that no row owns is undefined.
    """
    _check(query_THD, key_cache, value_cache)
    assert blocks_NM.stride(1) == 1
    assert len(positions_N) == len(blocks_NM) == len(query_starts_N1) - 1
    output_THD = torch.empty(query_THD.shape, dtype=query_THD.dtype, device=query_THD.device)
    _launch_tiles(
        (query_THD, key_cache, value_cache, output_THD), (blocks_NM, query_starts_N1, positions_N),
        scaling=scaling, sliding_window=sliding_window, longest_query=longest_query, block_size=key_cache.shape[1],
    )  # fmt: skip
    return output_THD


def packed_attention(
    query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, row_starts_S1: Tensor, *, scaling: float,
    sliding_window: int | None, longest: int, recompute: Recompute | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention within packed rows: the bits of `paged_attention` over the same rows.

    The backward pass differentiates `recompute` at the saved inputs. None: no gradient may be asked for.
    """
    _check(query_THD, key_TKD, value_TKD)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output_THD = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        _launch_tiles(
            (query, key.unsqueeze(0), value.unsqueeze(0), output_THD), (row_starts_S1, row_starts_S1, row_starts_S1),
            scaling=scaling, sliding_window=sliding_window, longest_query=longest, block_size=0,
        )  # fmt: skip
        return output_THD

    if recompute is not None:
        return _Recomputed.apply(attend, recompute, query_THD, key_TKD, value_TKD)
    wants_gradient = any(tensor.requires_grad for tensor in (query_THD, key_TKD, value_TKD))
    assert not (wants_gradient and torch.is_grad_enabled()), "packed_attention needs `recompute` to be differentiated"
    return attend(query_THD, key_TKD, value_TKD)


def decode_attention(
    query_NHD: Tensor, key_cache: Tensor, value_cache: Tensor, blocks_NM: Tensor, lengths_N: Tensor, *,
    scaling: float, sliding_window: int | None, splits: int, role: ChainRole = ChainRole.NONE,
) -> Tensor:  # fmt: skip
    """One query per row, at position lengths[n] - 1, over the lengths[n] >= 1 keys in its blocks.

    The keys of a row are shared out over `splits` programs; the time follows the row's own length, not the table's
    width. Bits depend on `splits` (and differ from `paged_attention`'s), but never on the other rows.
    """
    _check(query_NHD, key_cache, value_cache)
    num_rows, num_heads, head_dim = query_NHD.shape
    num_kv_heads = key_cache.shape[2]
    assert blocks_NM.stride(1) == 1
    assert num_rows == len(blocks_NM) == len(lengths_N)
    assert num_heads // num_kv_heads <= DECODE_LINES
    assert 1 <= splits <= MOST_SPLITS
    device = query_NHD.device
    output_NHD = torch.empty(query_NHD.shape, dtype=query_NHD.dtype, device=device)
    # Partial sums are kept in float32: rounding them would make an answer worse the more it is split.
    is_split = splits > 1
    parts = (num_rows, num_heads, splits)
    sums = torch.empty((*parts, head_dim), dtype=torch.float32, device=device) if is_split else output_NHD
    norms = torch.empty((2, *parts), dtype=torch.float32, device=device) if is_split else output_NHD
    wide = triton.next_power_of_2(head_dim)
    _decode_kernel[(num_rows, num_kv_heads, splits)](
        query_NHD, key_cache, value_cache, sums, norms, blocks_NM, lengths_N,
        scaling * _LOG2_E, sliding_window or _UNLIMITED, *query_NHD.stride()[:2], *key_cache.stride()[:3],
        *value_cache.stride()[:3], blocks_NM.stride(0), num_rows * num_heads * splits, splits,
        PER_KV=num_heads // num_kv_heads, HEAD=head_dim, WIDE=wide, LINES=DECODE_LINES, TILE=TILE_KEYS,
        BLOCK_SIZE=key_cache.shape[1], SPLIT=is_split, PRECISION=_precision(query_NHD),
        HAS_WINDOW=sliding_window is not None, ROLE=role,
        **_decode_shape(num_rows * num_kv_heads * splits, wide, key_cache), **launch_option(role),
    )  # fmt: skip
    if is_split:
        small = ChainRole.SMALL if role else ChainRole.NONE
        _merge_kernel[(num_rows * num_heads,)](
            sums, norms, output_NHD, num_rows * num_heads * splits, splits,
            HEAD=head_dim, WIDE=wide, SPLITS=triton.next_power_of_2(splits), ROLE=small, num_warps=4,
            **launch_option(small),
        )  # fmt: skip
    return output_NHD


def choose_splits(num_rows: int, num_kv_heads: int, widest: int, multiprocessors: int) -> int:
    """How many programs share a row's keys: a power of two that gives every multiprocessor about four programs.

    `widest` is the longest row to expect, in keys: a split of fewer than 256 costs more to merge than it saves.
    """
    wanted = 4 * multiprocessors // max(1, num_rows * num_kv_heads)
    most = min(wanted, widest // LEAST_KEYS_PER_SPLIT, MOST_SPLITS)
    return 1 << (most.bit_length() - 1) if most > 1 else 1


class _Recomputed(torch.autograd.Function):
    """Forward by the kernel, backward through a differentiable function of the same inputs."""

    @staticmethod
    def forward(ctx: Any, attend: Recompute, recompute: Recompute, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.recompute = recompute
        ctx.save_for_backward(query, key, value)
        return attend(query, key, value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.recompute(*inputs)
        return None, None, *torch.autograd.grad(output, inputs, gradient)


def _launch_tiles(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor], rows: tuple[Tensor, Tensor, Tensor], *, scaling: float,
    sliding_window: int | None, longest_query: int, block_size: int,
) -> None:  # fmt: skip
    """`tensors`: query, key, value (blocks first), output. `rows`: table, starts, positions. Block size 0: packed."""
    query, key, value, output = tensors
    table, starts, positions = rows
    _, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    per_kv = num_heads // num_kv_heads
    wide = triton.next_power_of_2(head_dim)
    lines = EXACT_LINES[query.dtype]
    grid = (triton.cdiv(longest_query * per_kv, lines), num_kv_heads, len(starts) - 1)
    if 0 in grid:
        return
    # Packed keys are one block, whose stride would grow with the number of tokens.
    key_strides, value_strides = (
        (tensor.stride(0) if block_size else 0, *tensor.stride()[1:3]) for tensor in (key, value)
    )
    _tiles_kernel[grid](
        query, key, value, output, table, starts, positions,
        scaling * _LOG2_E, sliding_window or _UNLIMITED, *query.stride()[:2], *key_strides, *value_strides,
        table.stride(0), PER_KV=per_kv, HEAD=head_dim, WIDE=wide, LINES=lines, TILE=TILE_KEYS,
        BLOCK_SIZE=block_size, PRECISION=_precision(query), **_launch_shape(wide, key),
        # Fused products and sums would round differently wherever the compiler happens to fuse them.
        enable_fp_fusion=False,
    )  # fmt: skip


def _launch_shape(wide: int, key: Tensor) -> dict[str, int]:
    """Warps and pipeline stages: by head size and dtype alone, as bits may depend on warps. Decode takes fewer stages
    where it has many programs, which a row's neighbours decide: stages say when keys are loaded, never how they are
    added up (tests/models/kernels/test_tiled_attention.py)."""
    tile_bytes = 2 * TILE_KEYS * wide * key.element_size()
    return {"num_warps": 4 if wide <= 128 else 8, "num_stages": 3 if tile_bytes <= 2**15 else 2}


def _decode_shape(programs: int, wide: int, key: Tensor) -> dict[str, int]:
    """Many programs hide each other's loads, and more of them fit where each has less shared memory: 39.4 us in place
    of 41.3 over 32 rows of 4,200 keys on an H200, where reading as many bytes and nothing else takes 39.6."""
    return {**_launch_shape(wide, key), **({"num_stages": 2} if programs >= MANY_PROGRAMS else {})}


def _precision(query: Tensor) -> str:
    return "ieee" if query.dtype == torch.float32 else "tf32"


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert key.shape == value.shape
    assert query.shape[1] % key.shape[-2] == 0
    assert query.dtype == key.dtype == value.dtype
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1


# Strides of queries, keys and values belong to the model, and that 16 divides them lets a thread load 16 bytes at once:
# they are specialised. What changes from step to step is not: a kernel would be compiled in the midst of a run.


@triton.jit
def _sweep(
    query_RD, place_R, key, value, table, packed_start, first, whole, stop, scale, window,
    key_block, key_slot, value_block, value_slot,
    HEAD: tl.constexpr, WIDE: tl.constexpr, LINES: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PRECISION: tl.constexpr, HAS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys first..stop, `first` a multiple of TILE: maximum, normaliser and weighted sum per line.

    With HAS_WHOLE every line sees all keys first..whole, whole tiles: they are read and added up without masks.

    A tile of which a line sees nothing leaves that line's state as it was, to the bit: its maximum stays, so it is
    multiplied by exp2(0) = 1 (or, before its first visible key, zero by zero), and zeros are added. Hence a line's
    result does not depend on what else its tile of lines makes the sweep visit.
    """
    maximum_R = tl.full([LINES], float("-inf"), tl.float32)
    normalizer_R = tl.zeros([LINES], tl.float32)
    sum_RD = tl.zeros([LINES, WIDE], tl.float32)
    if HAS_WHOLE:
        for start in range(first, whole, TILE):
            maximum_R, normalizer_R, sum_RD = _add_tile(
                maximum_R, normalizer_R, sum_RD, query_RD, place_R, key, value, table, packed_start, start, stop,
                scale, window, key_block, key_slot, value_block, value_slot, HEAD, WIDE, TILE, BLOCK_SIZE, PRECISION,
                True,
            )  # fmt: skip
        first = whole
    for start in range(first, stop, TILE):
        maximum_R, normalizer_R, sum_RD = _add_tile(
            maximum_R, normalizer_R, sum_RD, query_RD, place_R, key, value, table, packed_start, start, stop,
            scale, window, key_block, key_slot, value_block, value_slot, HEAD, WIDE, TILE, BLOCK_SIZE, PRECISION,
            False,
        )  # fmt: skip
    return maximum_R, normalizer_R, sum_RD


@triton.jit
def _add_tile(
    maximum_R, normalizer_R, sum_RD, query_RD, place_R, key, value, table, packed_start, start, stop, scale, window,
    key_block, key_slot, value_block, value_slot,
    HEAD: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """The state of every line behind one more tile of keys."""
    column_D = tl.arange(0, WIDE)
    place_L = start + tl.arange(0, TILE)
    is_stored_L = place_L < stop
    if BLOCK_SIZE == 0:
        block_L = tl.zeros([TILE], tl.int64)
        slot_L = packed_start + place_L
    else:
        if IS_WHOLE:
            block_L = tl.load(table + place_L // BLOCK_SIZE).to(tl.int64)
        else:
            block_L = tl.load(table + place_L // BLOCK_SIZE, mask=is_stored_L, other=0).to(tl.int64)
        slot_L = (place_L % BLOCK_SIZE).to(tl.int64)
    # What was never written may be NaN, and 0 * NaN is NaN: it is not read.
    is_read_LD = is_stored_L[:, None] & (column_D < HEAD)[None, :]
    key_L = key + block_L * key_block + slot_L * key_slot
    if IS_WHOLE and HEAD == WIDE:
        key_LD = tl.load(key_L[:, None] + column_D[None, :])
    else:
        key_LD = tl.load(key_L[:, None] + column_D[None, :], mask=is_read_LD, other=0.0)
    score_RL = tl.dot(query_RD, tl.trans(key_LD), input_precision=PRECISION) * scale
    if not IS_WHOLE:
        behind_RL = place_R[:, None] - place_L[None, :]
        score_RL = tl.where((behind_RL >= 0) & (behind_RL < window), score_RL, float("-inf"))
    higher_R = tl.maximum(maximum_R, tl.max(score_RL, 1))
    # Nothing seen yet: -inf - -inf would be NaN.
    finite_R = tl.where(higher_R == float("-inf"), 0.0, higher_R)
    weight_RL = tl.exp2(score_RL - finite_R[:, None])
    shrink_R = tl.exp2(maximum_R - finite_R)
    normalizer_R = normalizer_R * shrink_R + tl.sum(weight_RL, 1)
    value_L = value + block_L * value_block + slot_L * value_slot
    if IS_WHOLE and HEAD == WIDE:
        value_LD = tl.load(value_L[:, None] + column_D[None, :])
    else:
        value_LD = tl.load(value_L[:, None] + column_D[None, :], mask=is_read_LD, other=0.0)
    sum_RD = sum_RD * shrink_R[:, None]
    sum_RD = tl.dot(weight_RL.to(value_LD.dtype), value_LD, sum_RD, input_precision=PRECISION)
    return higher_R, normalizer_R, sum_RD


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["table", "starts", "positions"])
def _tiles_kernel(
    query, key, value, output, table, starts, positions, scale, window,
    query_token, query_head, key_block, key_slot, key_head, value_block, value_slot, value_head, table_row,
    PER_KV: tl.constexpr, HEAD: tl.constexpr, WIDE: tl.constexpr, LINES: tl.constexpr, TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of lines of one row and kv-head. Line i of a row is query i // G, head i % G of the group."""
    kv_head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    start = tl.load(starts + row).to(tl.int64)
    count = (tl.load(starts + row + 1).to(tl.int64) - start).to(tl.int32)
    # The last tiles of a row see the most keys: begun first, they are not waited for alone.
    first_line = (tl.num_programs(0) - 1 - tl.program_id(0)) * LINES
    if first_line >= count * PER_KV:
        return
    line_R = first_line + tl.arange(0, LINES)
    item_R = line_R // PER_KV
    is_real_R = item_R < count
    head_R = kv_head * PER_KV + line_R % PER_KV
    column_D = tl.arange(0, WIDE)
    is_real_RD = is_real_R[:, None] & (column_D < HEAD)[None, :]
    query_R = query + (start + item_R) * query_token + head_R * query_head
    query_RD = tl.load(query_R[:, None] + column_D[None, :], mask=is_real_RD, other=0.0)
    offset = 0 if BLOCK_SIZE == 0 else tl.load(positions + row).to(tl.int32)
    last_item = tl.minimum((first_line + LINES - 1) // PER_KV, count - 1)
    first_key = tl.maximum(offset + first_line // PER_KV - window + 1, 0) // TILE * TILE
    _, normalizer_R, sum_RD = _sweep(
        query_RD, offset + item_R, key + kv_head * key_head, value + kv_head * value_head, table + row * table_row,
        start, first_key, first_key, offset + last_item + 1, scale, window, key_block, key_slot, value_block,
        value_slot, HEAD, WIDE, LINES, TILE, BLOCK_SIZE, PRECISION, False,
    )  # fmt: skip
    output_R = output + ((start + item_R) * tl.num_programs(1) * PER_KV + head_R) * HEAD
    result_RD = (sum_RD / normalizer_R[:, None]).to(output.dtype.element_ty)
    tl.store(output_R[:, None] + column_D[None, :], result_RD, mask=is_real_RD)


@triton.jit(do_not_specialize=["table_row", "num_norms", "splits"], do_not_specialize_on_alignment=["table", "lengths"])
def _decode_kernel(
    query, key, value, sums, norms, table, lengths, scale, window,
    query_token, query_head, key_block, key_slot, key_head, value_block, value_slot, value_head, table_row,
    num_norms, splits,
    PER_KV: tl.constexpr, HEAD: tl.constexpr, WIDE: tl.constexpr, LINES: tl.constexpr, TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, HAS_WINDOW: tl.constexpr,
    ROLE: tl.constexpr,
):  # fmt: skip
    """One split of the keys of one row and kv-head. Unsplit, `sums` is the output itself."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    begin_in_chain(ROLE)
    length = tl.load(lengths + row).to(tl.int32)
    line_R = tl.arange(0, LINES)
    is_real_R = line_R < PER_KV
    head_R = kv_head * PER_KV + line_R
    column_D = tl.arange(0, WIDE)
    is_real_RD = is_real_R[:, None] & (column_D < HEAD)[None, :]
    query_R = query + row * query_token + head_R * query_head
    query_RD = tl.load(query_R[:, None] + column_D[None, :], mask=is_real_RD, other=0.0)
    first_tile = tl.maximum(length - window, 0) // TILE
    per_split = tl.cdiv(tl.cdiv(length, TILE) - first_tile, splits)
    first_key = (first_tile + split * per_split) * TILE
    stop = tl.minimum(first_key + per_split * TILE, length)
    maximum_R, normalizer_R, sum_RD = _sweep(
        query_RD, tl.zeros([LINES], tl.int32) + length - 1, key + kv_head * key_head, value + kv_head * value_head,
        table + row * table_row, 0, first_key, first_key + tl.maximum(stop - first_key, 0) // TILE * TILE, stop, scale,
        window, key_block, key_slot, value_block, value_slot, HEAD, WIDE, LINES, TILE, BLOCK_SIZE, PRECISION,
        not HAS_WINDOW,
    )  # fmt: skip
    end_in_chain(ROLE)
    place_R = row * tl.num_programs(1) * PER_KV + head_R
    if SPLIT:
        place_R = place_R * splits + split
        tl.store(norms + place_R, maximum_R, mask=is_real_R)
        tl.store(norms + num_norms + place_R, normalizer_R, mask=is_real_R)
    else:
        sum_RD = sum_RD / normalizer_R[:, None]
    tl.store(sums + place_R[:, None] * HEAD + column_D[None, :], sum_RD.to(sums.dtype.element_ty), mask=is_real_RD)


@triton.jit(do_not_specialize=["num_norms", "splits"])
def _merge_kernel(
    sums, norms, output, num_norms, splits, HEAD: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr,
    ROLE: tl.constexpr,
):  # fmt: skip
    """The splits of one row and head. An empty split has maximum -inf, hence no weight."""
    place = tl.program_id(0).to(tl.int64)
    split_S = tl.arange(0, SPLITS)
    column_D = tl.arange(0, WIDE)
    is_split_S = split_S < splits
    is_real_SD = is_split_S[:, None] & (column_D < HEAD)[None, :]
    place_S = place * splits + split_S
    begin_in_chain(ROLE)
    maximum_S = tl.load(norms + place_S, mask=is_split_S, other=float("-inf"))
    normalizer_S = tl.load(norms + num_norms + place_S, mask=is_split_S, other=0.0)
    weight_S = tl.exp2(maximum_S - tl.max(maximum_S, 0))
    sum_SD = tl.load(sums + place_S[:, None] * HEAD + column_D[None, :], mask=is_real_SD, other=0.0)
    sum_D = tl.sum(sum_SD * weight_S[:, None], 0) / tl.sum(normalizer_S * weight_S, 0)
    tl.store(output + place * HEAD + column_D, sum_D.to(output.dtype.element_ty), mask=column_D < HEAD)
