"""silu(gate) * up against Hugging Face's formula, float64 gradients, and itself in other company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from temper.models.kernels.swiglu import silu_mul, silu_mul_pair

DTYPES = [torch.float32, torch.bfloat16]


def draw(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def hugging_face(gate: Tensor, up: Tensor) -> Tensor:
    return ACT2FN["silu"](gate) * up


def is_same_product(ours: Tensor, theirs: Tensor) -> bool:
    """Exponentials differ in their last float32 bits: bf16 is equal but for a rare other rounding."""
    if ours.dtype == torch.float32:
        return torch.allclose(ours, theirs, rtol=5e-6, atol=1e-6)
    close = torch.allclose(ours.float(), theirs.float(), rtol=2**-7, atol=1e-6)
    return close and (ours != theirs).float().mean().item() < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [24, 1536])
def test_the_product_equals_hugging_face(device: torch.device, dtype: torch.dtype, width: int) -> None:
    joined = draw(device, dtype, 5, 2 * width)
    gate, up = joined.chunk(2, dim=1)
    ours = silu_mul(joined)
    assert ours.dtype == dtype
    assert is_same_product(ours, hugging_face(gate, up))
    assert torch.equal(ours, silu_mul_pair(gate, up))
    assert torch.equal(ours, silu_mul_pair(gate.contiguous(), up.contiguous()))
    assert torch.equal(ours, silu_mul_pair(gate.t().contiguous().t(), up))


def test_a_product_that_rounds_once_would_be_seen(device: torch.device) -> None:
    gate, up = draw(device, torch.bfloat16, 5, 1536).chunk(2, dim=1)
    once = hugging_face(gate.float(), up.float()).bfloat16()
    assert not is_same_product(once, hugging_face(gate, up))


def test_gates_far_from_zero_stay_finite(device: torch.device) -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.8, 0.0, 88.8, 200.0, 1e30]], device=device).requires_grad_()
    up = torch.ones_like(gate)
    ours = silu_mul_pair(gate, up)
    assert torch.allclose(ours, hugging_face(gate, up), atol=1e-6)
    (slope,) = torch.autograd.grad(ours.sum(), gate)
    assert torch.allclose(slope, torch.tensor([[0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0]], device=device), atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [24, 1536])
def test_gradients_equal_float64(device: torch.device, dtype: torch.dtype, width: int) -> None:
    joined, upstream = draw(device, dtype, 3, 2 * width), draw(device, dtype, 3, width)
    leaf, exact_leaf = joined.clone().requires_grad_(), joined.double().requires_grad_()
    (ours,) = torch.autograd.grad(silu_mul(leaf), leaf, upstream)
    (exact,) = torch.autograd.grad(hugging_face(*exact_leaf.chunk(2, dim=1)), exact_leaf, upstream.double())
    precision = 1e-5 if dtype == torch.float32 else 2**-7
    assert torch.allclose(ours.double(), exact, rtol=precision, atol=1e-5)
    pair = [part.clone().requires_grad_() for part in joined.chunk(2, dim=1)]
    apart = torch.autograd.grad(silu_mul_pair(*pair), pair, upstream)
    assert torch.equal(torch.cat(apart, dim=1), ours)
    assert not torch.allclose(ours.double(), exact.flip(1), rtol=precision, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_company(device: torch.device, dtype: torch.dtype) -> None:
    rows = draw(device, dtype, 64, 2 * 96)
    whole = silu_mul(rows)
    for start, count in [(0, 1), (41, 1), (3, 7), (57, 7)]:
        assert torch.equal(silu_mul(rows[start : start + count]), whole[start : start + count])
    assert torch.equal(silu_mul(rows.flip(0)), whole.flip(0))


def test_no_rows_are_fine(device: torch.device) -> None:
    rows = torch.empty(0, 64, device=device).requires_grad_()
    assert silu_mul(rows).shape == (0, 32)
    assert torch.autograd.grad(silu_mul(rows).sum(), rows)[0].shape == (0, 64)
    assert silu_mul_pair(rows, rows).shape == (0, 64)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="billions of elements take a GPU")
def test_many_rows_pass_the_limit_of_32_bits(device: torch.device) -> None:
    rows = torch.randn(1000, 2 * 14336, device=device, dtype=torch.bfloat16).repeat(100, 1)
    assert torch.equal(silu_mul(rows)[-1000:], silu_mul(rows[:1000]))
