"""A product on a CPU is the same product from whichever side, and in bfloat16 without instructions for it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from temper.models import ops
from temper.models.ops import FEW_ROWS, cpu_linear


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("outer", [24, 200])
@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("mkl", [True, False])
def test_a_product_of_few_rows_is_the_product(
    rows: int, outer: int, bias: bool, mkl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    torch.manual_seed(0)
    hidden, weight, shift = torch.randn(rows, 40), torch.randn(outer, 40), torch.randn(outer) if bias else None
    with torch.no_grad():
        found = cpu_linear(hidden, weight, shift)
    expected = functional.linear(hidden.double(), weight.double(), None if shift is None else shift.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_without_instructions_bfloat16_is_multiplied_in_float32_and_rounded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ops, "has_bfloat16_products", lambda: False)
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 64).bfloat16(), torch.randn(48, 64).bfloat16()
    with torch.no_grad():
        found = cpu_linear(hidden, weight, None)
    assert found.dtype is torch.bfloat16
    exact = hidden.double() @ weight.double().t()
    torch.testing.assert_close(found.double(), exact, rtol=1.01 * 2**-8, atol=1e-6)  # half of the last of its 8 bits
