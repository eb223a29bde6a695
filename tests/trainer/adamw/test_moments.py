"""Compact moments: how far a value may move when it is held, that it does not on average, and that a second moment
follows its gradients down."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from temper.trainer.adamw import moments
from temper.trainer.adamw.moments import BLOCK, COMPACT, MomentFormat, formats_for, round_to_bfloat16
from temper.trainer.adamw.noise import random_bits

SIZE = 16 * BLOCK
MIDDLE = torch.full((SIZE,), 1 << 15, dtype=torch.int32)
"""Random bits that are not: with them everything is rounded to the nearest, up where both are as near."""


def wide_values(seed: int = 0) -> Tensor:
    """Of either sign, over six powers of ten, with zeros and a block of nothing else."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(SIZE, generator=generator) * 10 ** (-6 * torch.rand(SIZE, generator=generator))
    values[::50] = 0
    values[BLOCK : 2 * BLOCK] = 0
    return values


def bits(step: int) -> Tensor:
    return random_bits(step * 7919, 0, SIZE, torch.device("cpu")) & 0xFFFF


def held_by(format_: MomentFormat) -> dict[str, Tensor]:
    return {name: torch.zeros(SIZE // part.values_each, dtype=part.dtype) for name, part in format_.parts.items()}


def stored(format_: MomentFormat, values: Tensor, random: Tensor) -> Tensor:
    held = held_by(format_)
    format_.write(held, values, random)
    return format_.read(held)


def scales_of(values: Tensor) -> Tensor:
    return values.abs().view(-1, BLOCK).amax(1, keepdim=True).expand(-1, BLOCK).flatten()


def spacing(states: str, moment: int, values: Tensor) -> Tensor:
    """Distance of the two held numbers on either side of each value, or a little more."""
    if states == "bfloat16":
        return values.abs() * 2**-7
    scales, levels, power = scales_of(values), *((127, 2), (255, 4))[moment]
    codes = (values.abs() / scales.clamp(min=1e-30)) ** (1 / power) * levels
    lower = (codes - 1e-3).floor().clamp(min=0)
    return (((lower + 1) / levels) ** power - (lower / levels) ** power) * scales * 1.001


@pytest.mark.parametrize("moment", [0, 1])
@pytest.mark.parametrize("states", COMPACT)
def test_what_is_held_is_one_of_the_two_nearest_numbers(states: str, moment: int) -> None:
    values = wide_values() if moment == 0 else wide_values().square()
    for step in range(20):
        found = stored(COMPACT[states][moment], values, bits(step))
        assert bool(((found - values).abs() <= spacing(states, moment, values)).all())
        assert bool((found[values == 0] == 0).all())
    # Eight bits keep the largest of a block exactly.
    largest = values.abs() == scales_of(values)
    if states == "8bit":
        torch.testing.assert_close(found[largest], values[largest], rtol=1e-6, atol=0)


@pytest.mark.parametrize("moment", [0, 1])
@pytest.mark.parametrize("states", COMPACT)
@pytest.mark.parametrize("nearest", [False, True])
def test_the_mean_over_many_roundings_is_the_value(states: str, moment: int, nearest: bool) -> None:
    """To the nearest, which is the mutation, it is not."""
    values = wide_values() if moment == 0 else wide_values().square()
    rounds = 400
    total = sum(stored(COMPACT[states][moment], values, MIDDLE if nearest else bits(step)) for step in range(rounds))
    width = spacing(states, moment, values).clamp(min=1e-30)
    # Below the smallest number that 8 bits hold, a second moment is rounded up: see the test of zeros.
    is_held = (values.abs() >= scales_of(values) / 255**4) & (values != 0)
    errors = ((total / rounds - values) / width)[is_held]
    # One rounding has a standard deviation of at most half the spacing; the mean of 400 of at most a fortieth of it.
    assert bool((errors.abs() < 6 * 0.5 / rounds**0.5).all()) != nearest
    assert abs(errors.mean().item()) < 0.005 or nearest


def test_a_second_moment_is_rounded_to_zero_only_from_zero() -> None:
    values = torch.zeros(SIZE)
    values[::BLOCK] = 1.0
    values[1::BLOCK] = 1e-20
    found = stored(COMPACT["8bit"][1], values, torch.zeros(SIZE, dtype=torch.int32) + 65535)
    torch.testing.assert_close(found[1::BLOCK], torch.full((16,), 255.0**-4), rtol=1e-5, atol=0)
    assert bool((found[2::BLOCK] == 0).all())


def squares_after(states: str, steps: int, *, nearest: bool) -> Tensor:
    """Second moments that began near 1 and whose squared gradients have been a tenth of them since, beside one in every
    block whose gradients stayed."""
    format_ = COMPACT[states][1]
    start = torch.linspace(0.3, 0.9, SIZE)
    gradients = start * 0.1
    start[::BLOCK] = gradients[::BLOCK] = 1.0
    held = held_by(format_)
    format_.write(held, start, MIDDLE)
    for step in range(steps):
        values = format_.read(held).mul_(0.999).add_(gradients, alpha=0.001)
        format_.write(held, values, MIDDLE if nearest else bits(step))
    return (format_.read(held) / start).view(-1, BLOCK)[:, 1:]


@pytest.mark.parametrize("states", COMPACT)
def test_a_second_moment_follows_gradients_that_became_smaller(states: str) -> None:
    expected = 0.1 + 0.9 * 0.999**700
    assert squares_after(states, 700, nearest=False).mean().item() == pytest.approx(expected, rel=0.02)
    # The mutation: to the nearest, nothing happens in 700 steps.
    assert squares_after(states, 700, nearest=True).mean().item() == pytest.approx(1.0, rel=0.02)


def test_norms_biases_and_small_matrices_are_held_wide() -> None:
    for shape in ((100_000,), (10, 10), (1, 4095)):
        both = formats_for("8bit", torch.Size(shape), torch.float32)
        assert {part.dtype for each in both for part in each.parts.values()} == {torch.float32}
    assert formats_for("8bit", torch.Size((64, 64)), torch.float32) == COMPACT["8bit"]
    assert formats_for("float32", torch.Size((64, 64)), torch.float64)[0].parts["exp_avg"].dtype == torch.float64


def test_bfloat16_rounding_keeps_what_is_a_bfloat16_already() -> None:
    values = wide_values().bfloat16()
    assert torch.equal(round_to_bfloat16(values.float(), MIDDLE * 0 + 65535), values)
    assert moments.BLOCK == 256, "checkpoints hold one scale for so many codes"
