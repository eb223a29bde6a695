"""How AdamW's two moments are held between updates: as float32, as bfloat16, or in 8 bits with a scale per block.

Owns: the formats, and rounding into them. Refuses: AdamW's arithmetic, which is done in float32 whatever holds the
moments, and where they live (residence.py).

Rounding is at random, up or down with the probability that makes the mean right. To the nearest, the second moment
stands still: with beta2 = 0.999 it changes by a thousandth of itself in a step, and half the distance to the next
number is 2 to 4 thousandths in bfloat16, more in 8 bits. A gradient that fell tenfold would never be seen to have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from temper.trainer.adamw.roots import rounded_root

States = Literal["float32", "bfloat16", "8bit"]
Held = Mapping[str, Tensor]
"""Parts of what is held of one bucket, by name."""
Quantize = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(values, random 16 bits for each) -> (codes, scales)."""
Dequantize = Callable[[Tensor, Tensor], Tensor]

BLOCK = 256
"""Values that share a scale. Every tensor begins a new block."""

SMALL_TENSOR = 4096
"""Tensors of fewer values are held in float32: together they weigh nothing."""

MEAN_LEVELS, SQUARE_LEVELS = 127, 255
"""Largest codes in 8 bits."""


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A flat tensor that holds something of every value of a bucket."""

    dtype: torch.dtype
    values_each: int = 1
    """Values that one element stands for."""

    @property
    def bytes_per_value(self) -> float:
        return self.dtype.itemsize / self.values_each


@dataclass(frozen=True, slots=True, eq=False)
class MomentFormat:
    """One way to hold one of the moments; there is one object of each. Names of parts are those in a checkpoint."""

    parts: Mapping[str, HeldPart]
    read: Callable[[Held], Tensor]
    """The values, flat, in float32 or wider. What is held wide is handed out itself and changed in place."""
    write: Callable[[Held, Tensor, Tensor], None]
    """(held, values, random 16 bits for each): takes the values over."""
    is_random: bool = True
    """Whether it uses random bits."""

    @property
    def bytes_per_value(self) -> float:
        return sum(part.bytes_per_value for part in self.parts.values())


def formats_for(states: States, shape: torch.Size, dtype: torch.dtype) -> tuple[MomentFormat, MomentFormat]:
    """Formats of first and second moment of a tensor with a master of this dtype. Norms, biases and small matrices are
    held wide whatever `states` says."""
    if states == "float32" or len(shape) < 2 or shape.numel() < SMALL_TENSOR:
        return _wide("exp_avg", dtype), _wide("exp_avg_sq", dtype)
    return COMPACT[states]


def _wide(name: str, dtype: torch.dtype) -> MomentFormat:
    return _WIDE[name, dtype]


def _get(name: str, held: Held) -> Tensor:
    return held[name]


def _keep(held: Held, values: Tensor, random: Tensor) -> None:
    """Changed in place already."""


def _held_itself(name: str, dtype: torch.dtype) -> MomentFormat:
    return MomentFormat({name: HeldPart(dtype)}, partial(_get, name), _keep, is_random=False)


def round_to_bfloat16(values: Tensor, random: Tensor) -> Tensor:
    """Up or down at random, with the mean of the value. `random` is 0 ... 65535.

    Of a float32, bfloat16 is the upper half. Added to the lower half, the random bits carry over into the upper one as
    often as the lower half is large.
    """
    bits = values.float().view(torch.int32) + random
    return bits.bitwise_and_(-0x10000).view(torch.float32).to(torch.bfloat16)


def _read_bfloat16(name: str, held: Held) -> Tensor:
    return held[name].float()


def _write_bfloat16(name: str, held: Held, values: Tensor, random: Tensor) -> None:
    held[name].copy_(round_to_bfloat16(values, random))


def _in_bfloat16(name: str) -> MomentFormat:
    return MomentFormat({name: HeldPart(torch.bfloat16)}, partial(_read_bfloat16, name), partial(_write_bfloat16, name))


def quantize_mean(values: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """Codes -127 ... 127 of flat values, and the scale of each block: its largest size, which is held exactly.

    Code c stands for scale * sign(c) (c / 127)^2: small values are as many as large ones and matter as much.
    """
    blocks = values.float().view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    units = (blocks.abs() / _divisors(scales)).mul_(MEAN_LEVELS**2)
    lower = rounded_root(units).floor_().clamp_(max=MEAN_LEVELS - 1)
    units.sub_(lower.square()).div_(lower * 2 + 1)  # how far it is from this code to the next
    codes = lower.add_(units > _uniform(random).view_as(units)).mul_(blocks.sign())
    return codes.to(torch.int8).flatten(), scales


def dequantize_mean(codes: Tensor, scales: Tensor) -> Tensor:
    """Scales are multiplied by a reciprocal: a GPU divides by a constant so, and a CPU would round otherwise."""
    units = codes.float().view(-1, BLOCK)
    units.mul_(units.abs()).mul_((scales * MEAN_LEVELS**-2)[:, None])
    return units.flatten()


def quantize_square(values: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """Codes 0 ... 255 of flat values, none negative, and the scale of each block.

    Code c stands for scale * (c / 255)^4: its root, which the update is divided by, is spaced as the first moment is.
    0 is for nothing but 0: a second moment that was rounded to it would blow the update up.
    """
    blocks = values.float().view(-1, BLOCK)
    scales = blocks.amax(1)
    units = (blocks / _divisors(scales)).mul_(float(SQUARE_LEVELS**4))
    lower = rounded_root(rounded_root(units)).floor_().clamp_(1, SQUARE_LEVELS - 1)
    below = lower.square().square_()
    above = (lower + 1).square_().square_()
    units.sub_(below).div_(above.sub_(below))
    codes = lower.add_(units > _uniform(random).view_as(units)).mul_(blocks > 0)
    return codes.to(torch.uint8).flatten(), scales


def dequantize_square(codes: Tensor, scales: Tensor) -> Tensor:
    units = codes.float().view(-1, BLOCK)
    units.square_().square_().mul_((scales * SQUARE_LEVELS**-4)[:, None])
    return units.flatten()


def _divisors(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, scales, 1.0)[:, None]


def _uniform(random: Tensor) -> Tensor:
    """0 ... 65535 to the middles of as many parts of (0, 1)."""
    return random.float().add_(0.5).mul_(2**-16)


def _read_codes(name: str, dequantize: Dequantize, held: Held) -> Tensor:
    return dequantize(held[name], held[f"{name}_scale"])


def _write_codes(name: str, quantize: Quantize, held: Held, values: Tensor, random: Tensor) -> None:
    codes, scales = quantize(values, random)
    held[name].copy_(codes)
    held[f"{name}_scale"].copy_(scales)


def _in_8_bits(name: str, dtype: torch.dtype, quantize: Quantize, dequantize: Dequantize) -> MomentFormat:
    parts = {name: HeldPart(dtype), f"{name}_scale": HeldPart(torch.float32, BLOCK)}
    return MomentFormat(parts, partial(_read_codes, name, dequantize), partial(_write_codes, name, quantize))


_WIDE = {
    (name, dtype): _held_itself(name, dtype)
    for name in ("exp_avg", "exp_avg_sq")
    for dtype in (torch.float32, torch.float64)
}
COMPACT: dict[str, tuple[MomentFormat, MomentFormat]] = {
    "bfloat16": (_in_bfloat16("exp_avg"), _in_bfloat16("exp_avg_sq")),
    "8bit": (
        _in_8_bits("exp_avg", torch.int8, quantize_mean, dequantize_mean),
        _in_8_bits("exp_avg_sq", torch.uint8, quantize_square, dequantize_square),
    ),
}
