"""What projections read, in either form: float8 rows are those of the plain states."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from temper.models.float8.arithmetic import Float8Rows, quantize_rows
from temper.models.float8.inputs import float8_inputs, plain_inputs
from temper.models.ops import ops_of

OPS = ops_of(torch.device("cpu"), "fast")


def is_quantised(rows: object, states: object) -> bool:
    assert isinstance(rows, Float8Rows)
    assert isinstance(states, Tensor)
    codes, scale = quantize_rows(states)
    is_same = torch.equal(rows.codes_TD.view(torch.uint8), codes.view(torch.uint8))
    return is_same and torch.equal(rows.scale_T1, scale) and rows.dtype == states.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float8_rows_are_the_plain_states_quantised(dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    plain, quantised = plain_inputs(OPS), float8_inputs(OPS)
    for before in (x, None):
        states, summed = plain.add_norm(before, residual, weight[0], 1e-6)
        rows, their_sum = quantised.add_norm(before, residual, weight[0], 1e-6)
        assert is_quantised(rows, states)
        assert torch.equal(their_sum, summed)
        assert not is_quantised(rows, summed)
    assert torch.equal(plain.add_norm(None, residual, weight[0], 1e-6)[1], residual)
    assert is_quantised(quantised.silu_mul(x), plain.silu_mul(x))
