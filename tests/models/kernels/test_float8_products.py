"""Products of few float8 rows against float64, for any cut of the inner dimension, and in any company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from temper.models.float8.arithmetic import spelled_quantize_rows
from temper.models.float8.tiles import Tiles, tiles_of
from temper.models.kernels.float8_products import few_rows_product

SMALL = Tiles(rows=64, outputs=64, parts=1, stages=3, warps=4)

Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def draw(device: torch.device, rows: int, outputs: int, width: int) -> Operands:
    """(codes, scale, weight, scale, bias)."""
    generator = torch.Generator().manual_seed(rows + outputs + width)
    states, weight = (torch.randn(count, width, generator=generator) for count in (rows, outputs))
    codes, scale = spelled_quantize_rows(states * torch.logspace(-2, 2, rows).unsqueeze(1))
    weights, channel_scale = spelled_quantize_rows(weight * torch.logspace(-1, 1, outputs).unsqueeze(1))
    bias = torch.randn(outputs, generator=generator)
    return tuple(part.to(device) for part in (codes, scale, weights, channel_scale[:, 0].contiguous(), bias))  # type: ignore[return-value]


def off_by(operands: Operands, tiles: Tiles, dtype: torch.dtype = torch.float32) -> float:
    """How far the largest error is, over the sum of what was added up."""
    codes, scale, weight, channel_scale, bias = operands
    found = few_rows_product(codes, scale, weight, channel_scale, bias, dtype, tiles).double()
    left, right = codes.double() * scale, weight.double() * channel_scale.unsqueeze(1)
    sizes = left.abs() @ right.abs().t() + bias.abs()
    return float(((found - (left @ right.t() + bias)).abs() / sizes).max())


def allowed(device: torch.device) -> float:
    """Hopper keeps 14 bits of a sum of float8 products."""
    return 2**-11 if device.type == "cuda" else 1e-6


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize(("rows", "outputs", "width"), [(5, 80, 384), (64, 64, 272), (70, 16, 400)])
def test_products_equal_float64_however_they_are_cut(
    device: torch.device, rows: int, outputs: int, width: int, parts: int
) -> None:
    operands = draw(device, rows, outputs, width)
    assert off_by(operands, replace(SMALL, parts=parts)) < allowed(device)
    assert off_by(operands, replace(SMALL, parts=parts), torch.bfloat16) < 2**-8 + allowed(device)


@pytest.mark.parametrize("parts", [1, 3])
def test_scales_biases_and_parts_of_others_would_be_seen(device: torch.device, parts: int) -> None:
    tiles = replace(SMALL, parts=parts)
    codes, scale, weight, channel_scale, bias = operands = draw(device, 40, 80, 784)
    found = few_rows_product(*operands, torch.float32, tiles)
    without_last_step = codes.clone()
    without_last_step.view(torch.uint8)[:, 768:] = 0
    mutations = [
        few_rows_product(codes, scale.flip(0), weight, channel_scale, bias, torch.float32, tiles),
        few_rows_product(codes, scale, weight, channel_scale.flip(0), bias, torch.float32, tiles),
        few_rows_product(codes, scale, weight, channel_scale, bias.flip(0), torch.float32, tiles),
        few_rows_product(codes, scale, weight, channel_scale, None, torch.float32, tiles),
        few_rows_product(without_last_step, scale, weight, channel_scale, bias, torch.float32, tiles),
    ]
    assert not any(torch.allclose(found, other, rtol=1e-2) for other in mutations)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_row_does_not_depend_on_its_company(device: torch.device, parts: int) -> None:
    tiles = replace(SMALL, parts=parts)
    codes, scale, *rest = draw(device, 70, 80, 784)
    whole = few_rows_product(codes, scale, *rest, torch.bfloat16, tiles)
    for start, count in [(0, 1), (41, 7), (60, 10)]:
        part = slice(start, start + count)
        assert torch.equal(few_rows_product(codes[part], scale[part], *rest, torch.bfloat16, tiles), whole[part])


def test_the_cut_of_the_rule_is_a_product_too(device: torch.device) -> None:
    tiles = tiles_of(9, 80, 1552)
    assert tiles is not None
    assert tiles.parts > 1
    assert off_by(draw(device, 9, 80, 1552), tiles) < allowed(device)


def test_no_rows_are_fine(device: torch.device) -> None:
    codes, scale, *rest = draw(device, 4, 80, 272)
    assert few_rows_product(codes[:0], scale[:0], *rest, torch.bfloat16, SMALL).shape == (0, 80)
