"""Kernels of a decode step against the operations that they stand for: to the bit where both round alike."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from temper.models import ops
from temper.models.decode_step.tiles import StepTiles, tiles_of
from temper.models.kernels.decode_step import add_norm, gated_product, product_parts, rotate_and_store_parts

BFLOAT16 = torch.bfloat16


def draw(device: torch.device, *shape: int, seed: int = 0, dtype: torch.dtype = BFLOAT16) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def off_by(found: Tensor, states: Tensor, weight: Tensor) -> float:
    """How far the largest error of states @ weight.T is, over the sum of what was added up."""
    wide = states.double() @ weight.double().t()
    sizes = states.double().abs() @ weight.double().abs().t()
    return float(((found.double() - wide).abs() / sizes).max())


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize(("rows", "outputs", "width"), [(5, 80, 384), (16, 64, 272), (40, 16, 400)])
def test_parts_add_up_to_the_product(device: torch.device, rows: int, outputs: int, width: int, parts: int) -> None:
    states, weight = draw(device, rows, width), draw(device, outputs, width)
    steps = math.ceil(math.ceil(width / 64) / parts)
    tiles = StepTiles(rows=64 if rows > 32 else 16, depth=64, steps=steps, parts=parts, stages=2)
    found = product_parts(states, weight, tiles)
    assert found.shape == (parts, rows, outputs)
    assert off_by(found.sum(0), states, weight) < 1e-6
    # Planted faults: a part that is left out, and a step too few.
    assert parts == 1 or off_by(found[1:].sum(0), states, weight) > 1e-3
    shorter = product_parts(states[:, :-64].contiguous(), weight[:, :-64].contiguous(), tiles)
    assert off_by(shorter.sum(0), states, weight) > 1e-3


def test_the_cut_of_the_rule_is_a_product_too(device: torch.device) -> None:
    states, weight = draw(device, 9, 1552), draw(device, 80, 1552)
    tiles = tiles_of(9, 80, 1552)
    assert tiles.parts > 1
    assert off_by(product_parts(states, weight, tiles).sum(0), states, weight) < 1e-6


def test_a_row_does_not_depend_on_its_company(device: torch.device) -> None:
    states, weight = draw(device, 16, 400), draw(device, 80, 400)
    tiles = tiles_of(16, 80, 400)
    whole = product_parts(states, weight, tiles)
    for start, count in [(0, 1), (5, 7), (15, 1)]:
        rows = slice(start, start + count)
        assert torch.equal(product_parts(states[rows], weight, tiles), whole[:, rows])


@pytest.mark.parametrize(("rows", "inner", "width"), [(5, 80, 384), (33, 64, 272)])
def test_a_gated_product_rounds_where_separate_steps_would(
    device: torch.device, rows: int, inner: int, width: int
) -> None:
    states, weight = draw(device, rows, width), draw(device, 2 * inner, width, seed=1)
    weight = weight / width**0.5
    gate_up = (states.float() @ weight.float().t()).to(BFLOAT16)
    found = gated_product(states, weight, tiles_of(rows, inner, width, is_gated=True))
    expected = ops.silu_mul(gate_up)
    # A sum in another order may round a gate to its neighbour; most are the same.
    assert (found == expected).float().mean() > 0.9
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-8)
    swapped = ops.silu_mul(torch.cat(gate_up.chunk(2, 1)[::-1], 1))
    assert (found == swapped).float().mean() < 0.5, "gate and up are not each other"


@pytest.mark.parametrize("parts", [0, 1, 3])
@pytest.mark.parametrize("width", [64, 100])
def test_a_norm_adds_up_parts_and_residual_as_separate_steps_do(device: torch.device, parts: int, width: int) -> None:
    residual, weight = draw(device, 5, width), draw(device, width)
    said = draw(device, parts, 5, width, dtype=torch.float32) if parts else None
    normed, summed = add_norm(said, residual, weight, 1e-5)
    total = None
    for part in [] if said is None else said:  # in the order of the parts
        total = part if total is None else total + part
    expected = residual if total is None else residual + total.to(BFLOAT16)
    assert torch.equal(summed, expected)
    reference = ops.rms_norm(expected, weight, 1e-5)
    assert (normed == reference).float().mean() > 0.95
    torch.testing.assert_close(normed, reference, rtol=2**-7, atol=1e-6)


def test_a_product_that_was_rounded_already_is_one_part(device: torch.device) -> None:
    residual, weight, said = draw(device, 5, 64), draw(device, 64), draw(device, 1, 5, 64)
    assert torch.equal(add_norm(said, residual, weight, 1e-5)[1], residual + said[0])


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_heads_are_normed_rotated_and_stored(device: torch.device, has_norms: bool, has_bias: bool) -> None:
    rows, heads, kv_heads, size, block_size = 3, 4, 2, 16, 4
    outputs = (heads + 2 * kv_heads) * size
    parts = draw(device, 2, rows, outputs, dtype=torch.float32)
    bias = draw(device, outputs, seed=1) if has_bias else None
    norms = (draw(device, size, seed=2), draw(device, size, seed=3), 1e-5) if has_norms else None
    angles = draw(device, 32, size, dtype=torch.float32)
    rotation = angles.cos().to(BFLOAT16), angles.sin().to(BFLOAT16)
    keys, values = (draw(device, 9, block_size, kv_heads, size, seed=seed) for seed in (4, 5))
    before = keys.clone(), values.clone()
    positions, blocks = torch.tensor([0, 6, 9], device=device), torch.arange(9, device=device).view(3, 3)
    query = rotate_and_store_parts(parts, bias, norms, rotation, positions, blocks, (keys, values))

    joined = (parts[0] + parts[1] + (0 if bias is None else bias.float())).to(BFLOAT16).view(rows, -1, size)
    queries, new_keys, new_values = joined.split([heads, kv_heads, kv_heads], 1)
    if norms is not None:
        queries, new_keys = (ops.rms_norm(x, norm, 1e-5) for x, norm in ((queries, norms[0]), (new_keys, norms[1])))
    cos, sin = (table[positions].float() for table in rotation)
    expected = ops.rotate(queries.float(), new_keys.float(), cos, sin)
    places = (blocks.gather(1, (positions // block_size)[:, None])[:, 0], positions % block_size)
    torch.testing.assert_close(query, expected[0].to(BFLOAT16), rtol=2**-6, atol=2**-7)
    torch.testing.assert_close(keys[places], expected[1].to(BFLOAT16), rtol=2**-6, atol=2**-7)
    assert torch.equal(values[places], new_values)
    is_other = torch.ones(keys.shape[:2], dtype=torch.bool, device=device)
    is_other[places] = False
    assert all(torch.equal(now[is_other], then[is_other]) for now, then in zip((keys, values), before, strict=True))
