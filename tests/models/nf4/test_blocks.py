"""The NF4 format: its levels are the paper's, what is held is the nearest of them, and the error is bounded."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from temper.models.nf4 import blocks
from temper.models.nf4.blocks import BLOCK, LEVELS, dequantise, quantise

WIDEST_HALF_STEP = max(b - a for a, b in pairwise(LEVELS)) / 2
SCALE_ERROR = 2**-8
"""Of the largest value of a block: its scale is rounded to bfloat16."""


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def round_trip(weight: Tensor) -> Tensor:
    return dequantise(*quantise(weight), torch.empty_like(weight))


def largest_of_blocks(weight: Tensor) -> Tensor:
    flat = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    return flat.abs().amax(1).repeat_interleave(BLOCK)[: weight.numel()].view(weight.shape)


def is_within_bounds(weight: Tensor) -> bool:
    """Half of the widest step, and the rounding of the scale."""
    error = (round_trip(weight).double() - weight.double()).abs()
    return bool((error <= (WIDEST_HALF_STEP + 2 * SCALE_ERROR) * largest_of_blocks(weight.double())).all())


def relative_error(weight: Tensor) -> float:
    return float(((round_trip(weight) - weight).pow(2).mean() / weight.pow(2).mean()).sqrt())


def test_the_levels_are_quantiles_of_a_normal_distribution_as_the_paper_takes_them() -> None:
    """Eight on the right, seven on the left, zero between them, all divided by the largest."""
    offset = 0.5 * ((1 - 1 / 32) + (1 - 1 / 30))
    right = torch.special.ndtri(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    left = -torch.special.ndtri(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    made = torch.cat((left, right, torch.zeros(1, dtype=torch.float64))).sort().values
    torch.testing.assert_close(torch.tensor(LEVELS, dtype=torch.float64), made / made.max(), rtol=0, atol=2e-7)


@pytest.mark.parametrize("shape", [(64,), (3, 100), (1, 1), (17, 48)])
def test_a_round_trip_stays_within_half_a_step_of_its_block(shape: tuple[int, ...]) -> None:
    weight = draw(*shape) * 10.0 ** draw(*shape, seed=1)
    assert is_within_bounds(weight)


def test_bits_of_a_normal_weight_lose_less_than_a_tenth() -> None:
    assert 0.05 < relative_error(draw(256, 256)) < 0.1


def test_levels_are_held_exactly() -> None:
    weight = torch.tensor(LEVELS * 8).view(2, 64) * 0.5
    assert torch.equal(round_trip(weight), weight)
    assert torch.equal(round_trip(torch.zeros(3, 70)), torch.zeros(3, 70))


def test_codes_that_are_off_by_one_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "table", lambda device: torch.tensor(LEVELS).roll(1))
    assert not is_within_bounds(draw(64, 64))


def test_scales_of_wider_blocks_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: one scale for the whole tensor, which small blocks are lost under."""
    weight = draw(64, 64) * torch.logspace(-3, 0, 64).unsqueeze(1)
    assert is_within_bounds(weight)

    def one_scale(values: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = plain(values / values.abs().max())
        return codes, torch.full_like(scales, float(values.abs().max()))

    plain = blocks._quantise_blocks
    monkeypatch.setattr(blocks, "_quantise_blocks", one_scale)
    assert not is_within_bounds(weight)


def test_large_tensors_are_quantised_in_parts_to_the_same_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = draw(50, 70)
    whole = quantise(weight)
    monkeypatch.setattr(blocks, "CHUNK_BLOCKS", 3)
    for ours, theirs in zip(quantise(weight), whole, strict=True):
        assert torch.equal(ours, theirs)


def test_codes_and_scales_take_just_over_half_a_byte_a_value() -> None:
    codes, scales = quantise(draw(128, 192))
    assert (codes.nbytes + scales.nbytes) / (128 * 192) == 0.53125


def test_codes_of_another_tensor_are_refused() -> None:
    codes, scales = quantise(draw(64, 64))
    with pytest.raises(AssertionError, match="another tensor"):
        dequantise(codes, scales, torch.empty(64, 65))
