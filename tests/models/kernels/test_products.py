"""Products against float64, and to the bit against themselves with other rows beside them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from temper.models.kernels import products
from temper.models.kernels.products import exact_linear, exact_product

SHAPES = ((96, 70), (64, 33), (80, 128))
"""(inner width, outputs): whole tiles, and tiles that are cut off on either side."""


def make(
    rows: int, width: int, outputs: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(*shape, generator=generator) for shape in ((rows, width), (outputs, width), (outputs,)))
    hidden, weight, bias = (tensor.to(device, dtype) for tensor in drawn)
    return hidden, weight, bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "outputs"), SHAPES)
def test_products_are_right(width: int, outputs: int, dtype: torch.dtype, device: torch.device) -> None:
    hidden, weight, bias = make(70, width, outputs, device, dtype)
    expected = hidden.double() @ weight.double().t() + bias.double()
    wide = exact_product(hidden, weight, bias, torch.float32)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.double(), expected, rtol=1e-5, atol=1e-4)
    without = exact_product(hidden, weight, None, dtype)
    torch.testing.assert_close(without.double(), expected - bias.double(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_in_a_batch_and_in_tiles_of_another_size(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, bias = make(200, 96, 70, device, dtype)
    together = exact_product(hidden, weight, bias, torch.float32)
    for first, stop in ((0, 1), (7, 9), (60, 130)):
        assert torch.equal(exact_product(hidden[first:stop], weight, bias, torch.float32), together[first:stop])
    monkeypatch.setattr(products, "FEW_ROWS", 0)
    assert torch.equal(exact_product(hidden, weight, bias, torch.float32), together)


def test_the_gradient_is_that_of_a_plain_product(device: torch.device) -> None:
    found, expected = ([t.requires_grad_() for t in make(20, 64, 33, device, torch.float32)] for _ in range(2))
    exact_linear(found[0], found[1], found[2]).square().sum().backward()
    torch.nn.functional.linear(expected[0], expected[1], expected[2]).square().sum().backward()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-3)


def test_transposed_and_sliced_inputs_are_taken(device: torch.device) -> None:
    hidden, weight, _ = make(40, 96, 70, device, torch.float32)
    expected = exact_product(hidden, weight, None, torch.float32)
    assert torch.equal(exact_product(hidden.t().contiguous().t(), weight, None, torch.float32), expected)
    assert torch.equal(exact_product(hidden[10:], weight, None, torch.float32), expected[10:])
    assert exact_product(hidden[:0], weight, None, torch.float32).shape == (0, 70)
