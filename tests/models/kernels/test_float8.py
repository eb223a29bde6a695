"""Kernels that write float8 rows, alone or with what makes the rows, write what it says in torch's words."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from temper.models.float8.arithmetic import spelled_quantize_rows
from temper.models.kernels.float8 import quantize_rows
from temper.models.kernels.norms import add_rms_norm, add_rms_norm_float8, rms_norm
from temper.models.kernels.swiglu import silu_mul, silu_mul_float8

DTYPES = [torch.float32, torch.bfloat16]
EPSILON = 1e-6
WIDTHS = [16, 48, 130, 3584]
ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="rows of a 7B model take the interpreter seconds")


def draw(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Rows of very different size, one of them zero."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    x *= torch.logspace(-3, 3, shape[0]).unsqueeze(1)
    x[4] = 0
    return x.to(device, dtype)


def is_same(ours: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> bool:
    """Codes and scales, to the bit."""
    codes = torch.equal(ours[0].view(torch.uint8).cpu(), wanted[0].view(torch.uint8).cpu())
    return codes and torch.equal(ours[1].cpu(), wanted[1].cpu())


def spelled(x: Tensor) -> tuple[Tensor, Tensor]:
    """On a CPU: torch divides by a number on a GPU by multiplying with its reciprocal, which rounds twice."""
    return spelled_quantize_rows(x.cpu())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_and_scales_equal_the_spelled_ones(device: torch.device, dtype: torch.dtype, width: int) -> None:
    x = draw(device, dtype, 9, width)
    assert is_same(quantize_rows(x), spelled(x))
    assert is_same(quantize_rows(x.t().contiguous().t()), spelled(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_norm_in_float8_is_the_norm_quantised(device: torch.device, dtype: torch.dtype, width: int) -> None:
    x, residual = draw(device, dtype, 9, width), draw(device, dtype, 9, width, seed=1)
    weight = torch.rand(width, generator=torch.Generator().manual_seed(2)).to(device, dtype) + 0.5
    normed, summed = add_rms_norm(x, residual, weight, EPSILON)
    ours, our_sum = add_rms_norm_float8(x, residual, weight, EPSILON)
    assert torch.equal(our_sum, summed)
    assert is_same(ours, spelled(normed))
    alone, same = add_rms_norm_float8(None, residual, weight, EPSILON)
    assert same is residual
    assert is_same(alone, spelled(rms_norm(residual, weight, EPSILON)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16, 40, 1000, pytest.param(18944, marks=ON_A_GPU)])
def test_a_gated_row_in_float8_is_the_gated_row_quantised(device: torch.device, dtype: torch.dtype, width: int) -> None:
    gate_up = draw(device, dtype, 9, 2 * width)
    assert is_same(silu_mul_float8(gate_up), spelled(silu_mul(gate_up)))
    assert is_same(silu_mul_float8(gate_up.t().contiguous().t()), spelled(silu_mul(gate_up)))


def test_what_is_quantised_before_it_is_rounded_to_the_dtype_would_be_seen(device: torch.device) -> None:
    x, residual = (draw(device, torch.bfloat16, 9, 130, seed=seed) for seed in (0, 1))
    weight = torch.full((130,), 0.7, device=device, dtype=torch.bfloat16)
    unrounded = rms_norm((x + residual).float(), weight.float(), EPSILON)
    assert not is_same(add_rms_norm_float8(x, residual, weight, EPSILON)[0], spelled(unrounded))
    gate_up = draw(device, torch.bfloat16, 9, 80)
    assert not is_same(silu_mul_float8(gate_up), spelled(silu_mul(gate_up.float())))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_none(device: torch.device, bad: float) -> None:
    """Or an engine with broken weights would draw on."""
    x = draw(device, torch.bfloat16, 9, 32)
    x[2, 3] = bad
    weight = torch.ones(32, device=device, dtype=torch.bfloat16)
    for codes, _ in (quantize_rows(x), add_rms_norm_float8(None, x, weight, EPSILON)[0], silu_mul_float8(x + 1)):
        assert codes[2].float().isnan().any()
        assert not codes[[0, 1, 3, 4, 5]].float().isnan().any()


def test_no_rows_are_fine(device: torch.device) -> None:
    rows = torch.empty(0, 64, device=device)
    weight = torch.ones(64, device=device)
    for codes, scale in (quantize_rows(rows), add_rms_norm_float8(rows, rows, weight, EPSILON)[0]):
        assert (codes.shape, scale.shape) == ((0, 64), (0, 1))
    assert silu_mul_float8(rows)[0].shape == (0, 32)
