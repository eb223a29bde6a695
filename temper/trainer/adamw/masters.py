"""A float32 master weight in the bits that its bfloat16 weight leaves out.

Owns: taking a float32 apart into the bfloat16 that it rounds to and a remainder of 16 bits, and putting it together
again, exactly. Refuses: which tensors have masters (optim.py).
A float32 master beside a bfloat16 weight would hold the weight's 16 bits a second time: 6 bytes instead of 4.
float16 is no half of a float32. There the remainder is what rounding took away, a float32 of its own: the difference
of a number and its rounding is exact, and so is their sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Exceptions:
    """Masters whose remainder is ambiguous: those halfway between two bfloat16 numbers, one in 65536.

    Such a master is rounded to the even neighbour, which may lie above or below; 16 bits have no room left to say which
    way it was. So that rounding stays what it always was, those that the rest does not give are listed.
    """

    places: Tensor
    bits: Tensor
    """The whole float32, as int32."""


def split(master: Tensor, *, kernel: bool = False) -> tuple[Tensor, Tensor, Exceptions]:
    """(bfloat16 weight, int16 remainder, exceptions) of a flat float32 tensor; the weight is rounded to the nearest.

    On a GPU waits for the device once: how many exceptions there are, only it knows. kernel: in one pass over memory,
    with the same bits.
    """
    if kernel:
        from temper.trainer.adamw.kernels import split_masters  # triton is there with a GPU only

        weight, remainder, is_exception = split_masters(master)
    else:
        weight = master.to(torch.bfloat16)
        remainder = master.view(torch.int32).to(torch.int16)  # the lower half: conversion keeps the low bits
        is_exception = _joined(weight, remainder) != master.view(torch.int32)
    places = is_exception.nonzero()[:, 0]
    return weight, remainder, Exceptions(places, master.view(torch.int32)[places])


def split_settled(master: Tensor) -> tuple[Tensor, Tensor]:
    """(bfloat16 weight, int16 remainder) without exceptions: a master that would be one is moved by one unit in its
    last place, towards 0. The weight is what it rounds to all the same.

    For masters beside compact moments, which are rounded far more: a list would have to be counted by the host.
    """
    bits = master.view(torch.int32)
    bits = bits - ((bits & 0x1FFFF) == 0x8000).int()
    return bits.view(torch.float32).to(torch.bfloat16), bits.to(torch.int16)


def join(weight: Tensor, remainder: Tensor, exceptions: Exceptions | None, *, kernel: bool = False) -> Tensor:
    """The float32 master, flat. No exceptions: none were listed yet, or there are none (split_settled)."""
    if kernel:
        from temper.trainer.adamw.kernels import join_masters

        bits = join_masters(weight, remainder)
    else:
        bits = _joined(weight, remainder)
    if exceptions is not None and len(exceptions.places):
        bits[exceptions.places] = exceptions.bits
    return bits.view(torch.float32)


def split_float16(master: Tensor) -> tuple[Tensor, Tensor]:
    """(float16 weight, float32 remainder) of a flat float32 tensor."""
    weight = master.to(torch.float16)
    return weight, master - weight.float()


def join_float16(weight: Tensor, remainder: Tensor) -> Tensor:
    return weight.float() + remainder


def _joined(weight: Tensor, remainder: Tensor) -> Tensor:
    """The remainder is signed: where rounding went up it is negative, and the sum borrows from the upper half."""
    bits = weight.view(torch.int16).to(torch.int32)
    bits <<= 16
    bits += remainder
    return bits
