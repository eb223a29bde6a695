"""Random bits that depend on seed, step and place alone."""

from __future__ import annotations

import pytest
import torch

from temper.trainer.adamw.noise import high_half, key_of, low_half, random_bits

CPU = torch.device("cpu")


def hash_of(number: int) -> int:
    """lowbias32, as its author wrote it."""
    number %= 1 << 32
    number ^= number >> 16
    number = number * 0x7FEB352D % (1 << 32)
    number ^= number >> 15
    number = number * 0x846CA68B % (1 << 32)
    return number ^ (number >> 16)


def test_bits_are_the_hash_of_the_place_also_where_32_bits_end() -> None:
    for first in (0, 12345, (1 << 31) - 3, (1 << 32) - 3, 7 << 32):
        bits = random_bits(key_of(1, 2), first, 8, CPU)
        expected = [hash_of(first + place + key_of(1, 2)) for place in range(8)]
        assert [number % (1 << 32) for number in bits.tolist()] == expected


def test_bits_of_a_place_do_not_depend_on_where_one_begins() -> None:
    whole = random_bits(99, 0, 1000, CPU)
    assert torch.equal(whole, torch.cat([random_bits(99, 0, 300, CPU), random_bits(99, 300, 700, CPU)]))


def test_halves_are_even_and_have_nothing_to_do_with_each_other_or_with_another_step() -> None:
    count = 1 << 18
    now, later = (random_bits(key_of(0, step), 0, count, CPU) for step in (1, 2))
    columns = torch.stack([half(bits) for bits in (now, later) for half in (low_half, high_half)]).double()
    assert int(columns.min()) >= 0
    assert int(columns.max()) <= 65535
    # The mean of n numbers is within 5 standard errors of 32767.5; a correlation within 5 / sqrt(n) of 0.
    assert (columns.mean(1) - 32767.5).abs().max() < 5 * 65536 / (12 * count) ** 0.5
    assert (torch.corrcoef(columns) - torch.eye(4)).abs().max() < 5 / count**0.5
    assert all((column.remainder(2).mean() - 0.5).abs() < 5 * 0.5 / count**0.5 for column in columns)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_the_same_bits() -> None:
    first = (1 << 31) - 500
    on_gpu = random_bits(key_of(3, 4), first, 1000, torch.device("cuda"))
    assert torch.equal(on_gpu.cpu(), random_bits(key_of(3, 4), first, 1000, CPU))
