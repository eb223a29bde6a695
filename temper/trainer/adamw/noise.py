"""Random bits as a function of a seed, a step and a place, for rounding at random.

Owns: the hash. Refuses: state; a generator with one would have to be saved, and its numbers would depend on the order
of calls. Here a resumed run, another bucket size and another device draw the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 1 << 32


def key_of(seed: int, step: int) -> int:
    """32 bits for all places of one step."""
    return _mixed(_mixed(seed % _WORD) ^ (step % _WORD))


def random_bits(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """[count] of int32, all 32 bits random: those of the places first, first + 1, ... Places 2^32 apart share theirs.

    The hash of integers "lowbias32" (Wellons, 2018) on place + key. Products wrap, as they do on every device.
    """
    bits = torch.arange(count, dtype=torch.int32, device=device)
    bits += signed(first + key)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits ^= _shifted(bits, shift)
        bits *= signed(factor)
    bits ^= _shifted(bits, 16)
    return bits


def low_half(bits: Tensor) -> Tensor:
    """0 ... 65535 from the lower 16 bits."""
    return bits & 0xFFFF


def high_half(bits: Tensor) -> Tensor:
    """0 ... 65535 from the upper 16 bits, which are independent of the lower ones."""
    return _shifted(bits, 16)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """To the right, with zeros from the left: torch copies the sign bit."""
    return (bits >> by).bitwise_and_((1 << (32 - by)) - 1)


def signed(number: int) -> int:
    """The int32 of the same bits."""
    number %= _WORD
    return number - _WORD if number >= _WORD // 2 else number


def _mixed(number: int) -> int:
    """The same hash of one plain number."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        number ^= number >> shift
        number = number * factor % _WORD
    return number ^ (number >> 16)
