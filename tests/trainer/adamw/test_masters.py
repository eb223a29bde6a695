"""Masters taken apart and put together are the same to the bit, and weights are rounded as torch rounds them."""

from __future__ import annotations

import torch
from torch import Tensor

from temper.trainer.adamw.masters import join, join_float16, split, split_float16, split_settled


def floats(*uppers: int) -> Tensor:
    """Every float32 with these upper halves."""
    lower = torch.arange(1 << 16, dtype=torch.int32)
    return torch.cat([lower + torch.tensor(upper << 16, dtype=torch.int64).to(torch.int32) for upper in uppers]).view(
        torch.float32
    )


EVEN, ODD, NEGATIVE, TINY, LARGEST = 0x3F80, 0x3F81, 0xBF81, 0x0000, 0x7F7F


def test_every_lower_half_comes_back_also_halfway_between_two_weights() -> None:
    masters = floats(EVEN, ODD, NEGATIVE, TINY, LARGEST)
    weight, remainder, exceptions = split(masters)
    assert torch.equal(weight, masters.to(torch.bfloat16))
    joined = join(weight, remainder, exceptions)
    assert torch.equal(joined.view(torch.int32), masters.view(torch.int32))
    # The mutation: 16 bits alone do not tell the two ways of a tie apart. One of the two ways is wrong for each upper
    # half that is even.
    assert len(exceptions.places) == 2
    alone = join(weight, remainder, None)
    assert int((alone != masters).sum()) == 2


def test_settled_masters_need_no_exceptions_and_move_by_one_unit_where_they_would_be_one() -> None:
    masters = floats(EVEN, ODD, NEGATIVE, 0xBF80, TINY, LARGEST)
    weight, remainder = split_settled(masters)
    assert torch.equal(weight, masters.to(torch.bfloat16)), "rounding stays what it is"
    moved = masters.view(torch.int32) - join(weight, remainder, None).view(torch.int32)
    # The even upper halves have one each, of either sign.
    ties = torch.tensor([0x3F808000, 0xBF808000, 0x00008000]).to(torch.int32)
    assert masters.view(torch.int32)[moved != 0].tolist() == ties.tolist()
    assert moved[moved != 0].tolist() == [1, 1, 1], "towards 0"


def test_random_masters_come_back_and_almost_none_is_an_exception() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        masters = torch.randn(1 << 20)
    masters[:2] = torch.tensor([0.0, -0.0])
    weight, remainder, exceptions = split(masters)
    joined = join(weight, remainder, exceptions)
    assert torch.equal(joined.view(torch.int32), masters.view(torch.int32))
    assert remainder.dtype == torch.int16
    assert len(exceptions.places) < 40  # 8 are expected: one in 131072


def test_a_float16_weight_and_its_remainder_are_the_master_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    masters = torch.randn(100_000, generator=generator) * torch.logspace(-7, 4, 100_000)
    weight, remainder = split_float16(masters)
    assert torch.equal(weight, masters.half())
    assert torch.equal(join_float16(weight, remainder), masters)
    # The mutation: a remainder in half precision, too, loses bits.
    assert not torch.equal(join_float16(weight, remainder.half().float()), masters)
