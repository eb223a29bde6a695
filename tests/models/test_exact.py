"""In exact mode a row's bits do not depend on its company."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from temper.models.exact import exact_attention, tiled_linear
from temper.models.ops import ops_of

WIDTHS = [(32, 96), (576, 960), (1536, 576)]


def differing(linear: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, inner: int, outer: int) -> int:
    """In how many ways of batching the same rows come out otherwise than all together."""
    torch.manual_seed(0)
    weight, rows = torch.randn(outer, inner).to(dtype), torch.randn(100, inner).to(dtype)
    together = linear(rows, weight)
    return sum(
        not torch.equal(linear(rows[start : start + count], weight), together[start : start + count])
        for count in (1, 2, 3, 17, 50)
        for start in (0, 5, 31)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "outer"), WIDTHS)
def test_a_tiled_product_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype, inner: int, outer: int) -> None:
    assert differing(tiled_linear, dtype, inner, outer) == 0


def test_an_untiled_product_would_be_noticed() -> None:
    assert sum(differing(functional.linear, torch.float32, *widths) for widths in WIDTHS) > 0


def test_a_tiled_product_has_the_gradient_of_a_product() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 8), (7, 8), (7,))]
    assert torch.autograd.gradcheck(tiled_linear, tensors)


def make_rows(heads: int, kv_heads: int, size: int, length: int = 150) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    query = torch.randn(3, length, heads, size)
    key, value = torch.randn(2, 3, length, kv_heads, size)
    return query, key, value, torch.arange(length).expand(3, length)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (14, 2, 64), (2, 1, 16), (4, 4, 128)])
def test_attention_does_not_depend_on_chunks_neighbours_or_padding(
    heads: int, kv_heads: int, size: int, window: int | None
) -> None:
    query, key, value, positions = make_rows(heads, kv_heads, size)
    whole = exact_attention(query, key, value, positions, 0.125, window)
    alone = exact_attention(query[1:2], key[1:2], value[1:2], positions[1:2], 0.125, window)
    assert torch.equal(alone[0], whole[1])
    for start, stop in ((0, 37), (37, 64), (60, 150), *((place, place + 1) for place in (0, 1, 15, 63, 64, 65, 149))):
        garbage = (torch.full((3, 37, kv_heads, size), 7.0), torch.full((3, 37, kv_heads, size), -3.0))
        keys, values = (torch.cat((t[:, :stop], g), dim=1) for t, g in zip((key, value), garbage, strict=True))
        chunk = exact_attention(query[:, start:stop], keys, values, positions[:, start:stop], 0.125, window)
        assert torch.equal(chunk, whole[:, start:stop]), (start, stop)


@pytest.mark.parametrize("window", [None, 40])
def test_attention_is_attention(window: int | None) -> None:
    query, key, value, positions = make_rows(9, 3, 64)
    seen = torch.ones(150, 150, dtype=torch.bool).tril()
    seen = seen if window is None else seen.triu(1 - window)
    expected = functional.scaled_dot_product_attention(
        query.transpose(1, 2).double(),
        *(t.repeat_interleave(3, 2).transpose(1, 2).double() for t in (key, value)),
        attn_mask=seen,
        scale=0.125,
    ).transpose(1, 2)
    actual = exact_attention(query, key, value, positions, 0.125, window)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def rows_that_differ(silu_mul: Callable[[Tensor], Tensor]) -> int:
    """How many rows come out otherwise alone than where two or three threads divide them among themselves."""
    torch.manual_seed(0)
    gate_up, before, wrong = torch.randn(700, 320), torch.get_num_threads(), 0
    alone = torch.cat([silu_mul(row) for row in gate_up.split(1)])
    for threads in (2, 3):
        torch.set_num_threads(threads)
        try:
            for count in (500, 611, 700):
                wrong += int((silu_mul(gate_up[:count]) != alone[:count]).any(1).sum())
        finally:
            torch.set_num_threads(before)
    return wrong


def test_a_row_of_silu_does_not_depend_on_where_threads_divide_the_batch() -> None:
    assert rows_that_differ(ops_of(torch.device("cpu"), "exact").silu_mul) == 0
    assert rows_that_differ(ops_of(torch.device("cpu"), "fast").silu_mul) > 0  # what the test is able to notice
