"""float8 with scales by row: how far an entry may be off, and what the emulated product is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from temper.models.float8 import arithmetic
from temper.models.float8.arithmetic import FLOAT8, LARGEST, float8_linear, quantize_rows

SIZES = torch.logspace(-3, 3, 12).unsqueeze(1)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def off_by(x: Tensor, rows: Tensor, scale: Tensor) -> Tensor:
    """How far every entry is off, over how far it may be: half of the last of 4 bits, or of the least number."""
    allowed = torch.maximum(x.abs() / 16, scale * 2.0**-10)
    return (rows.float() * scale - x).abs() / allowed


def test_every_entry_is_within_half_a_step_whatever_the_size_of_its_row() -> None:
    x = draw(12, 64) * SIZES
    rows, scale = quantize_rows(x)
    assert (rows.dtype, scale.dtype, scale.shape) == (FLOAT8, torch.float32, (12, 1))
    assert off_by(x, rows, scale).max() <= 1.0 + 1e-5
    # The mutation that must break it: one scale for all rows.
    one = scale.max().expand_as(scale)
    off = ((x / one).to(FLOAT8).float() * one - x).abs() / torch.maximum(x.abs() / 16, scale * 2.0**-10)
    assert off.max() > 10


def test_the_largest_entry_of_a_row_is_kept_and_zeros_stay_zeros() -> None:
    x = draw(5, 32)
    x[3] = 0
    rows, scale = quantize_rows(x)
    largest = (rows.float() * scale).abs().amax(1)
    assert torch.allclose(largest, x.abs().amax(1), rtol=1e-6)
    assert not rows[3].float().any()
    assert rows.float().isfinite().all()


def test_largest_entries_of_any_size_become_the_largest_code() -> None:
    """Whichever way their scale and its reciprocal were rounded."""
    largest = torch.rand(20000, 1, generator=torch.Generator().manual_seed(0)) * 2 - 1
    rows, _ = quantize_rows(largest * torch.logspace(-3, 38, 20000).unsqueeze(1))
    assert torch.equal(rows.float(), largest.sign() * LARGEST)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_that_of_what_was_quantised(dtype: torch.dtype) -> None:
    hidden, weight, bias = draw(7, 32).to(dtype), draw(24, 32) * SIZES.repeat(2, 1), draw(24)
    rows, scale = quantize_rows(weight)
    found = float8_linear(hidden, rows, scale[:, 0], bias)
    states, by_row = quantize_rows(hidden)
    wanted = (states.double() * by_row) @ (rows.double() * scale).T + bias
    assert found.dtype == dtype
    assert torch.allclose(found.double(), wanted, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-3)
    # The mutation that must break it: scales of other channels.
    assert not torch.allclose(float8_linear(hidden, rows, scale[:, 0].flip(0), bias).double(), wanted, rtol=0.5)


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    hidden, (rows, scale) = draw(6, 32), quantize_rows(draw(24, 32))
    louder = hidden.clone()
    louder[5] *= 1e4
    together, beside = (float8_linear(x, rows, scale[:, 0], None)[:5] for x in (hidden, louder))
    assert torch.equal(together, beside)


@pytest.mark.parametrize(("capability", "has"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_gpus_without_float8_compute_in_torchs_words(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], has: bool
) -> None:
    monkeypatch.setattr(arithmetic, "_capability", lambda device: capability)
    assert arithmetic.has_float8(torch.device("cuda")) is has
    assert not arithmetic.has_float8(torch.device("cpu"))
