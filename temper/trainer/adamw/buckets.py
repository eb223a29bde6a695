"""A bucket that is about to be updated: spelled in torch, or by a kernel.

Owns: both ways, which give the same bits. Refuses: where its tensors come from and go to (state.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from temper.trainer.adamw.layout import Slice
from temper.trainer.adamw.moments import BLOCK, Held, HeldPart
from temper.trainer.adamw.update import UpdateRule, measure_update

REMAINDER = "remainder"
"""Part of a bucket with masters: what its weights leave out of them."""

Norms = tuple[Tensor, Tensor]
"""Norms of changes, and norms of the masters before them, of tensors that are a bucket together."""


@dataclass(frozen=True, slots=True)
class WideBucket:
    """A bucket to compute with: tensors of its slices, to be changed in place."""

    slices: tuple[Slice, ...]
    is_decayed: bool
    masters: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    apply: Callable[[UpdateRule, list[Tensor], list[Tensor], list[Tensor], list[Tensor]], None]
    flat: tuple[Tensor, Tensor, Tensor] | None
    """Masters, means and squares as they lie, for the kernel that measures the update; None: torch does."""

    def update(self, rule: UpdateRule, gradients: list[Tensor], shrink: Tensor) -> Norms:
        """Changes the gradients, too: they are multiplied by `shrink`."""
        torch._foreach_mul_(gradients, shrink)
        self.apply(rule, self.masters, gradients, self.means, self.squares)
        if self.flat is not None:
            from temper.trainer.adamw.kernels import measure_flat  # triton is there with a GPU only

            by_block = HeldPart(torch.float32, BLOCK)
            inside = [ranges_of(piece, by_block)[0] for piece in self.slices]
            return measure_flat(rule, *self.flat, [(blocks.start, blocks.stop) for blocks in inside])
        return measure_update(rule, self.masters, self.means, self.squares)


@dataclass(frozen=True, slots=True)
class HeldBucket:
    """A bucket as it is held, for the kernel."""

    slices: tuple[Slice, ...]
    is_decayed: bool
    weights: list[Tensor]
    held: Held
    moments: dict[str, HeldPart]
    """Parts of both moments."""
    noise_at: int
    """Key of the step, plus place of the first value."""

    def update(self, rule: UpdateRule, gradients: list[Tensor], shrink: Tensor) -> Norms:
        """One launch for each slice, and nothing that waits for the device."""
        from temper.trainer.adamw.kernels import HeldPiece, update_piece

        factors, by_block = rule.factors, HeldPart(torch.float32, BLOCK)
        shrink = shrink.to(self.weights[0].device, torch.float32)
        sums = shrink.new_zeros(2, ranges_of(self.slices[-1], by_block)[0].stop)
        for piece, weight, gradient in zip(self.slices, self.weights, gradients, strict=True):
            moments = tuple(self.held[name][ranges_of(piece, part)[0]] for name, part in self.moments.items())
            remainder = self.held.get(REMAINDER)
            if remainder is not None:
                remainder = remainder[piece.place : piece.place + piece.size]
            held = HeldPiece(weight, remainder, moments)
            place = self.noise_at + piece.place
            update_piece(factors, held, gradient, shrink, place, sums[:, ranges_of(piece, by_block)[0]])
        norms = sums.sum(1, dtype=torch.float64).sqrt().float()
        return norms[:1], norms[1:]


@cache
def has_kernels(device_type: str) -> bool:
    return device_type == "cuda" and find_spec("triton") is not None


def ranges_of(piece: Slice, part: HeldPart) -> tuple[slice, slice]:
    """Where a part of a slice lies in its bucket, and in the tensor of the parameter."""
    each, count = part.values_each, -(-piece.size // part.values_each)
    inside, outside = piece.place // each, piece.start // each
    return slice(inside, inside + count), slice(outside, outside + count)
