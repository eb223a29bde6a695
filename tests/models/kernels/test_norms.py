"""The norms against Hugging Face's module, against float64 gradients, and against themselves in other company."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from temper.models.kernels.norms import add_rms_norm, rms_norm

EPSILON = 1e-5
DTYPES = [torch.float32, torch.bfloat16]


def draw(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def hugging_face(x: Tensor, weight: Tensor) -> Tensor:
    module = LlamaRMSNorm(x.shape[-1], eps=EPSILON).to(x.device, x.dtype)
    module.weight.data.copy_(weight)
    return module(x).detach()


def plain(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * weight


def is_same_norm(ours: Tensor, theirs: Tensor) -> bool:
    """Both sum in float32, in different orders: float32 to its precision, bf16 equal but for a rare other rounding."""
    if ours.dtype == torch.float32:
        return torch.allclose(ours, theirs, rtol=2e-6, atol=1e-6)
    close = torch.allclose(ours.float(), theirs.float(), rtol=2**-7, atol=1e-6)
    return close and (ours != theirs).float().mean().item() < 0.01


def gradients(function: Callable[..., Tensor | tuple[Tensor, ...]], inputs: list[Tensor], upstream: list[Tensor]):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    outputs = function(*leaves)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    return torch.autograd.grad(outputs, leaves, [g.to(o.dtype) for g, o in zip(upstream, outputs, strict=True)])


def is_same_gradient(ours: Tensor, exact: Tensor) -> bool:
    precision = 2e-5 if ours.dtype == torch.float32 else 2**-7
    return torch.allclose(ours.double(), exact, rtol=precision, atol=precision * exact.abs().max().item())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 576, 896, 1536])
def test_the_norm_equals_hugging_face(device: torch.device, dtype: torch.dtype, width: int) -> None:
    x, weight = draw(device, dtype, 5, width), draw(device, dtype, width)
    ours = rms_norm(x, weight, EPSILON)
    assert ours.dtype == dtype
    assert is_same_norm(ours, hugging_face(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_is_rounded_before_it_is_normalised(device: torch.device, dtype: torch.dtype) -> None:
    x, residual, weight = draw(device, dtype, 6, 576), 9 * draw(device, dtype, 6, 576), draw(device, dtype, 576)
    normed, summed = add_rms_norm(x, residual, weight, EPSILON)
    assert torch.equal(summed, residual + x)
    assert torch.equal(normed, rms_norm(summed, weight, EPSILON))
    assert is_same_norm(normed, hugging_face(residual + x, weight))


def test_a_norm_that_rounds_once_would_be_seen(device: torch.device) -> None:
    x, weight = draw(device, torch.bfloat16, 5, 576), draw(device, torch.bfloat16, 576)
    once = plain(x.float(), weight.float()).to(torch.bfloat16)
    assert not is_same_norm(once, hugging_face(x, weight))


def test_a_float32_weight_counts_as_its_rounding_to_the_dtype_of_the_rows(device: torch.device) -> None:
    x, weight = draw(device, torch.bfloat16, 3, 64), draw(device, torch.float32, 64)
    assert torch.equal(rms_norm(x, weight, EPSILON), rms_norm(x, weight.bfloat16(), EPSILON))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(3, 576), (37, 576), (300, 64)])
def test_gradients_equal_float64(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> None:
    x, weight, upstream = draw(device, dtype, rows, width), draw(device, dtype, width), draw(device, dtype, rows, width)
    ours = gradients(lambda x, w: rms_norm(x, w, EPSILON), [x, weight], [upstream])
    exact = gradients(plain, [x.double(), weight.double()], [upstream.double()])
    assert all(map(is_same_gradient, ours, exact))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_the_sum_are_added(device: torch.device, dtype: torch.dtype) -> None:
    x, residual, first, second = (draw(device, dtype, 4 + n, 896)[:4] for n in range(4))
    weight = draw(device, dtype, 896)
    ours = gradients(lambda *a: add_rms_norm(*a, EPSILON), [x, residual, weight], [first, second])
    # The kernel's sum is rounded; the reference starts from the same rounded sum.
    summed = (residual + x).double()
    exact_sum, exact_weight = gradients(lambda s, w: (plain(s, w), s * 1), [summed, weight.double()], [first, second])
    assert is_same_gradient(ours[0], exact_sum)
    assert torch.equal(ours[0], ours[1])
    assert is_same_gradient(ours[2], exact_weight)
    without_sum, _ = gradients(plain, [summed, weight.double()], [first])
    assert not is_same_gradient(ours[0], without_sum)


def test_either_output_of_the_added_norm_may_be_unused(device: torch.device) -> None:
    x, residual = (draw(device, torch.float32, 2, 64).requires_grad_() for _ in range(2))
    weight = draw(device, torch.float32, 64).requires_grad_()
    normed, summed = add_rms_norm(x, residual, weight, EPSILON)
    (only_sum,) = torch.autograd.grad(summed.sum(), x, retain_graph=True)
    assert torch.equal(only_sum, torch.ones_like(x))
    (only_normed,) = torch.autograd.grad(normed.sum(), x)
    (exact,) = torch.autograd.grad(plain((x + residual).double(), weight.double()).sum(), x)
    assert torch.allclose(only_normed, exact, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 576])
def test_a_row_does_not_depend_on_its_company(device: torch.device, dtype: torch.dtype, width: int) -> None:
    rows, weight = draw(device, dtype, 64, width), draw(device, dtype, width)
    whole = rms_norm(rows, weight, EPSILON)
    whole_gradient, _ = gradients(lambda x, w: rms_norm(x, w, EPSILON), [rows, weight], [rows.flip(0)])
    for start, count in [(0, 1), (41, 1), (3, 7), (57, 7)]:
        part = rows[start : start + count]
        assert torch.equal(rms_norm(part, weight, EPSILON), whole[start : start + count])
        upstream = rows.flip(0)[start : start + count]
        gradient, _ = gradients(lambda x, w: rms_norm(x, w, EPSILON), [part, weight], [upstream])
        assert torch.equal(gradient, whole_gradient[start : start + count])
    order = torch.arange(63, -1, -1, device=device)
    assert torch.equal(rms_norm(rows[order], weight, EPSILON), whole[order])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_where_it_lies_in_memory(device: torch.device, dtype: torch.dtype) -> None:
    weight = draw(device, dtype, 64)
    wide = draw(device, dtype, 6, 5 * 64 + 1)
    for start in (0, 1, 64):  # 1: no alignment that vector loads could use
        part = wide[:, start : start + 64]
        assert torch.equal(rms_norm(part, weight, EPSILON), rms_norm(part.clone(), weight, EPSILON))
    flat = draw(device, dtype, 6 * 64 + 1)[1:].view(6, 64)
    assert torch.equal(rms_norm(flat, weight, EPSILON), rms_norm(flat.clone(), weight, EPSILON))
    assert torch.equal(add_rms_norm(flat, flat, weight, EPSILON)[0], rms_norm(flat + flat, weight, EPSILON))


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_normalised_in_place_of_a_joined_projection(device: torch.device, dtype: torch.dtype) -> None:
    joined, weight = draw(device, dtype, 7, 9 + 2 * 3, 64), draw(device, dtype, 64)
    for heads in (joined[:, :9], joined[:, 9:12], joined):
        expected = rms_norm(heads.reshape(-1, 64), weight, EPSILON).view(heads.shape)
        assert torch.equal(rms_norm(heads, weight, EPSILON), expected)
        upstream = draw(device, dtype, *heads.shape)
        ours = gradients(lambda j, w, n=heads.shape[1]: rms_norm(j[:, :n], w, EPSILON), [joined, weight], [upstream])
        exact = gradients(lambda j, w, n=heads.shape[1]: plain(j[:, :n], w), [joined.double(), weight.double()],
                          [upstream])  # fmt: skip
        assert all(map(is_same_gradient, ours, exact))


def test_no_rows_are_fine(device: torch.device) -> None:
    x, weight = torch.empty(0, 576, device=device), torch.ones(576, device=device)
    assert rms_norm(x, weight, EPSILON).shape == (0, 576)
    assert [part.shape for part in add_rms_norm(x, x, weight, EPSILON)] == [(0, 576)] * 2
    grad_x, grad_weight = gradients(lambda x, w: rms_norm(x, w, EPSILON), [x, weight], [x])
    assert grad_x.shape == (0, 576)
    assert torch.equal(grad_weight, torch.zeros(576, device=device))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="two hundred thousand rows take a GPU")
def test_many_rows_pass_the_limit_of_32_bits(device: torch.device) -> None:
    rows, width = 300_000, 8192
    x = torch.randn(1000, width, device=device, dtype=torch.bfloat16).repeat(rows // 1000, 1)
    weight = torch.ones(width, device=device, dtype=torch.bfloat16)
    assert torch.equal(rms_norm(x, weight, EPSILON)[-1000:], rms_norm(x[:1000], weight, EPSILON))
