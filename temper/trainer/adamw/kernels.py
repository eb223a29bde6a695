"""AdamW's update of one piece of a parameter in one pass over memory: gradient, weight and moments are read as they are
held, and written back so. Beside it, for moments in float32, what stands around torch's own kernel: masters are put
together, taken apart and measured.

Owns: the kernels. Refuses: any bit of its own. What it computes is spelled in torch, step by step, in masters.py,
moments.py, noise.py and `apply_in_order` of update.py, and its result is theirs to the bit: every operation rounds
once, by IEEE 754, in their order. The norms that it reports beside are sums in another order.
Shapes: _B blocks of one program, _V values of a block.
"""
# Triton has no types, and its kernels are not Python functions.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from temper.trainer.adamw.moments import BLOCK, MEAN_LEVELS, SQUARE_LEVELS
from temper.trainer.adamw.noise import signed
from temper.trainer.adamw.update import UpdateFactors, UpdateRule

BLOCKS = 4
"""Blocks of one program, one for each of its warps, so that none waits for another: a thread has 8 values, 16 bytes of
bfloat16, in 119 registers. With 16 values it would need 219."""

OPTIONS: dict[str, Any] = {"BLOCKS": BLOCKS, "BLOCK": BLOCK, "num_warps": BLOCKS, "enable_fp_fusion": False}
if torch.version.hip is None:
    # Else quotients and roots of the smallest numbers would be 0. Moments of a word that is never seen get there.
    OPTIONS["enable_reflect_ftz"] = False

_MEAN_LEVELS, _SQUARE_LEVELS = tl.constexpr(MEAN_LEVELS), tl.constexpr(SQUARE_LEVELS)


@dataclass(frozen=True, slots=True)
class HeldPiece:
    """A slice of a parameter and what is held of it, flat, all on one device. Changed in place."""

    weight: Tensor
    """bfloat16, float16 or float32."""
    remainder: Tensor | None
    """What a weight leaves out of its master. None: it is its own master."""
    moments: tuple[Tensor, ...]
    """Mean and square in bfloat16, or codes and scales of the mean, codes and scales of the square."""


def update_piece(
    factors: UpdateFactors, piece: HeldPiece, gradient: Tensor, shrink: Tensor, noise_at: int, sums: Tensor
) -> None:
    """Updates the piece with gradient * shrink, which are not changed.

    noise_at: key and place of the first value, added. sums: [2, blocks], takes the squares of changes and those of the
    masters before them, added up by block.
    """
    size = piece.weight.numel()
    mean, mean_scale, square, square_scale = (
        piece.moments if len(piece.moments) == 4 else (piece.moments[0],) * 2 + (piece.moments[1],) * 2
    )
    _update_kernel[(triton.cdiv(size, BLOCKS * BLOCK),)](
        piece.weight, piece.weight if piece.remainder is None else piece.remainder, gradient,
        mean, mean_scale, square, square_scale, shrink, sums[0], sums[1], size, signed(noise_at),
        factors.mean_kept, factors.mean_added, factors.square_kept, factors.square_added,
        factors.root, factors.epsilon, factors.rate, factors.decay,
        IN_BLOCKS=len(piece.moments) == 4, **OPTIONS,
    )  # fmt: skip


WIDE = 1024
"""Values of one program of the kernels for flat masters."""


def join_masters(weight: Tensor, remainder: Tensor) -> Tensor:
    """masters.py: the bits of float32 masters, as int32."""
    bits = torch.empty(weight.shape, dtype=torch.int32, device=weight.device)
    _join_kernel[(triton.cdiv(len(weight), WIDE),)](weight, remainder, bits, len(weight), BLOCK=WIDE, num_warps=4)
    return bits


def split_masters(master: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """masters.py: weights, remainders, and which of them do not give the master back."""
    weight = torch.empty(master.shape, dtype=torch.bfloat16, device=master.device)
    remainder = torch.empty(master.shape, dtype=torch.int16, device=master.device)
    is_exception = torch.empty(master.shape, dtype=torch.bool, device=master.device)
    _split_kernel[(triton.cdiv(len(master), WIDE),)](
        master, weight, remainder, is_exception.view(torch.int8), len(master), BLOCK=WIDE, num_warps=4
    )
    return weight, remainder, is_exception


def measure_flat(
    rule: UpdateRule, master: Tensor, mean: Tensor, square: Tensor, blocks: Sequence[tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    """update.py: measure_update of tensors that lie end to end, in one launch; its sums are added up in another order.
    blocks: first and last + 1 of each tensor's blocks; gaps between tensors are zero in all three."""
    first, second = 1 - rule.beta1**rule.num_steps, (1 - rule.beta2**rule.num_steps) ** 0.5
    count = len(master) // BLOCK
    sums = torch.empty((2, count), dtype=torch.float32, device=master.device)
    _measure_kernel[(triton.cdiv(count, BLOCKS),)](
        master, mean, square, sums, count, first, second, rule.epsilon, rule.learning_rate, rule.weight_decay,
        BLOCKS=BLOCKS, BLOCK=BLOCK, num_warps=BLOCKS,
    )  # fmt: skip
    squares = torch.empty((2, len(blocks)), dtype=torch.float64, device=master.device)
    _add_blocks_kernel[(2, len(blocks))](
        sums, torch.tensor(blocks, device=master.device), squares, count, BLOCK=WIDE, num_warps=4
    )
    changes, befores = squares.sqrt()
    kept = 1 - rule.learning_rate * rule.weight_decay
    return (changes * (rule.learning_rate / kept)).float(), (befores / kept).float()


@triton.jit
def _join_kernel(weight, remainder, bits, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    joined = _bits_of_bfloat16(weight, place, mask) + tl.load(remainder + place, mask=mask, other=0).to(tl.int32)
    tl.store(bits + place, joined, mask=mask)


@triton.jit
def _split_kernel(master, weight, remainder, is_exception, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    value = tl.load(master + place, mask=mask, other=0.0)
    bits = value.to(tl.int32, bitcast=True)
    rounded, rest = value.to(tl.bfloat16), bits.to(tl.int16)
    joined = (rounded.to(tl.int16, bitcast=True).to(tl.int32) << 16) + rest.to(tl.int32)
    tl.store(weight + place, rounded, mask=mask)
    tl.store(remainder + place, rest, mask=mask)
    tl.store(is_exception + place, (joined != bits).to(tl.int8), mask=mask)


@triton.jit(do_not_specialize=["count"])
def _measure_kernel(
    master, mean, square, sums, count, first, second, epsilon, rate, decay,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block_B = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    is_block_B = block_B < count
    place_BV = block_B[:, None].to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    after_BV = tl.load(master + place_BV, mask=is_block_B[:, None], other=0.0)
    mean_BV = tl.load(mean + place_BV, mask=is_block_B[:, None], other=0.0)
    size_BV = tl.sqrt(tl.load(square + place_BV, mask=is_block_B[:, None], other=0.0))
    push_BV = mean_BV / (size_BV / second + epsilon) / first
    change_BV, before_BV = push_BV + decay * after_BV, after_BV + rate * push_BV
    tl.store(sums + block_B, tl.sum(change_BV * change_BV, 1), mask=is_block_B)
    tl.store(sums + count + block_B, tl.sum(before_BV * before_BV, 1), mask=is_block_B)


@triton.jit(do_not_specialize=["count"])
def _add_blocks_kernel(sums, ranges, squares, count, BLOCK: tl.constexpr):
    """The sums of one tensor's blocks, in their order."""
    which, tensor = tl.program_id(0), tl.program_id(1)
    first, stop = tl.load(ranges + 2 * tensor), tl.load(ranges + 2 * tensor + 1)
    total_B = tl.zeros([BLOCK], tl.float64)
    for start in range(first, stop, BLOCK):
        place_B = start + tl.arange(0, BLOCK)
        total_B += tl.load(sums + which * count + place_B, mask=place_B < stop, other=0.0).to(tl.float64)
    tl.store(squares + which * tl.num_programs(1) + tensor, tl.sum(total_B, 0))


# Nothing is compiled anew for what differs from step to step or from slice to slice, but for sizes that 16 does not
# divide: a mask that may end anywhere lets no thread read two values at once.
@triton.jit(
    do_not_specialize=["noise_at"],
    do_not_specialize_on_alignment=["mean_scale", "square_scale", "shrink", "changes", "befores"],
)
def _update_kernel(
    weight, remainder, gradient, mean, mean_scale, square, square_scale, shrink, changes, befores, size, noise_at,
    mean_kept, mean_added, square_kept, square_added, root, epsilon, rate, decay,
    IN_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block_B = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    place_BV = block_B[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_value_BV = place_BV < size
    is_block_B = block_B * BLOCK < size
    low_BV, high_BV = _random_halves(place_BV + noise_at)

    gradient_BV = tl.load(gradient + place_BV, mask=is_value_BV, other=0.0).to(tl.float32) * tl.load(shrink)
    before_BV = _load_master(weight, remainder, place_BV, is_value_BV)
    if IN_BLOCKS:
        mean_scale_B = tl.load(mean_scale + block_B, mask=is_block_B, other=0.0)
        square_scale_B = tl.load(square_scale + block_B, mask=is_block_B, other=0.0)
        mean_BV = _mean_of_codes(tl.load(mean + place_BV, mask=is_value_BV, other=0), mean_scale_B)
        square_BV = _square_of_codes(tl.load(square + place_BV, mask=is_value_BV, other=0), square_scale_B)
    else:
        mean_BV = _bits_of_bfloat16(mean, place_BV, is_value_BV).to(tl.float32, bitcast=True)
        square_BV = _bits_of_bfloat16(square, place_BV, is_value_BV).to(tl.float32, bitcast=True)

    mean_BV = mean_BV * mean_kept + gradient_BV * mean_added
    square_BV = square_BV * square_kept + gradient_BV * gradient_BV * square_added
    push_BV = tl.div_rn(mean_BV, tl.sqrt_rn(square_BV) * root + epsilon) * rate
    pull_BV = before_BV * decay
    _store_master(weight, remainder, place_BV, is_value_BV, before_BV - pull_BV - push_BV)

    if IN_BLOCKS:
        codes_BV, scales_B = _codes_of_mean(mean_BV, low_BV)
        tl.store(mean + place_BV, codes_BV, mask=is_value_BV)
        tl.store(mean_scale + block_B, scales_B, mask=is_block_B)
        codes_BV, scales_B = _codes_of_square(square_BV, high_BV)
        tl.store(square + place_BV, codes_BV, mask=is_value_BV)
        tl.store(square_scale + block_B, scales_B, mask=is_block_B)
    else:
        tl.store(mean + place_BV, _bfloat16_of(mean_BV, low_BV), mask=is_value_BV)
        tl.store(square + place_BV, _bfloat16_of(square_BV, high_BV), mask=is_value_BV)

    change_BV = tl.where(is_value_BV, pull_BV + push_BV, 0.0)
    tl.store(changes + block_B, tl.sum(change_BV * change_BV, 1), mask=is_block_B)
    tl.store(befores + block_B, tl.sum(before_BV * before_BV, 1), mask=is_block_B)


@triton.jit
def _random_halves(place):
    """noise.py: the lower and the upper 16 bits of the hash, as int32."""
    bits = place.to(tl.uint32, bitcast=True)
    bits ^= bits >> 16
    bits *= 0x7FEB352D
    bits ^= bits >> 15
    bits *= 0x846CA68B
    bits ^= bits >> 16
    return (bits & 0xFFFF).to(tl.int32), (bits >> 16).to(tl.int32)


@triton.jit
def _load_master(weight, remainder, place, mask):
    """masters.py: join, join_float16, or the weight itself."""
    dtype: tl.constexpr = weight.dtype.element_ty
    if dtype == tl.bfloat16:
        bits = _bits_of_bfloat16(weight, place, mask) + tl.load(remainder + place, mask=mask, other=0).to(tl.int32)
        return bits.to(tl.float32, bitcast=True)
    elif dtype == tl.float16:
        value = tl.load(weight + place, mask=mask, other=0.0).to(tl.float32)
        return value + tl.load(remainder + place, mask=mask, other=0.0)
    else:
        return tl.load(weight + place, mask=mask, other=0.0)


@triton.jit
def _bits_of_bfloat16(pointer, place, mask):
    """Those of the same number in float32, as int32: the interpreter widens the smallest ones wrongly."""
    return tl.load(pointer + place, mask=mask, other=0.0).to(tl.int16, bitcast=True).to(tl.int32) << 16


@triton.jit
def _store_master(weight, remainder, place, mask, master):
    """masters.py: split_settled, split_float16, or the weight itself."""
    dtype: tl.constexpr = weight.dtype.element_ty
    if dtype == tl.bfloat16:
        bits = master.to(tl.int32, bitcast=True)
        bits -= ((bits & 0x1FFFF) == 0x8000).to(tl.int32)
        tl.store(weight + place, bits.to(tl.float32, bitcast=True).to(tl.bfloat16), mask=mask)
        tl.store(remainder + place, bits.to(tl.int16), mask=mask)
    elif dtype == tl.float16:
        rounded = master.to(tl.float16)
        tl.store(weight + place, rounded, mask=mask)
        tl.store(remainder + place, master - rounded.to(tl.float32), mask=mask)
    else:
        tl.store(weight + place, master, mask=mask)


@triton.jit
def _bfloat16_of(values, random):
    """moments.py: round_to_bfloat16."""
    bits = values.to(tl.int32, bitcast=True) + random
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _uniform(random):
    return (random.to(tl.float32) + 0.5) * 0.0000152587890625


@triton.jit
def _mean_of_codes(codes, scales_B):
    units = codes.to(tl.float32)
    return units * tl.abs(units) * (scales_B * (1.0 / _MEAN_LEVELS**2))[:, None]


@triton.jit
def _square_of_codes(codes, scales_B):
    units = codes.to(tl.float32)
    units *= units
    return units * units * (scales_B * (1.0 / _SQUARE_LEVELS**4))[:, None]


@triton.jit
def _codes_of_mean(values, random):
    """moments.py: quantize_mean."""
    sizes = tl.abs(values)
    scales_B = tl.max(sizes, 1)
    units = tl.div_rn(sizes, _divisors(values, scales_B)) * (1.0 * _MEAN_LEVELS**2)
    lower = tl.minimum(tl.floor(tl.sqrt_rn(units)), 1.0 * (_MEAN_LEVELS - 1))
    units = tl.div_rn(units - lower * lower, lower * 2.0 + 1.0)
    codes = lower + (units > _uniform(random)).to(tl.float32)
    codes = tl.where(values < 0, -codes, tl.where(values > 0, codes, 0.0))
    return codes.to(tl.int32).to(tl.int8), scales_B


@triton.jit
def _codes_of_square(values, random):
    """moments.py: quantize_square."""
    scales_B = tl.max(values, 1)
    units = tl.div_rn(values, _divisors(values, scales_B)) * (1.0 * _SQUARE_LEVELS**4)
    lower = tl.floor(tl.sqrt_rn(tl.sqrt_rn(units)))
    lower = tl.minimum(tl.maximum(lower, 1.0), 1.0 * (_SQUARE_LEVELS - 1))
    below, above = lower * lower, (lower + 1.0) * (lower + 1.0)
    below, above = below * below, above * above
    units = tl.div_rn(units - below, above - below)
    codes = lower + (units > _uniform(random)).to(tl.float32)
    return tl.where(values > 0, codes, 0.0).to(tl.int32).to(tl.uint8), scales_B


@triton.jit
def _divisors(values, scales_B):
    """Of the shape of the values: a division takes no other."""
    return tl.broadcast_to(tl.where(scales_B > 0, scales_B, 1.0)[:, None], values.shape)
