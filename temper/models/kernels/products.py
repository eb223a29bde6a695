"""Matrix products with weights in Triton whose rows do not depend on the rows beside them.

A library picks its routine by the number of rows: few are multiplied by another one than many, or with the inner
dimension cut up, and then a token's log-probability depends on its company. Here every output is one sum from the first
column to the last, by one instruction.
Owns: the product and its order of summation. Refuses: gradients of its own, which need not be exact.
Shapes: _T rows, _D inner width, _O outputs.
"""
# Triton has no types, and its kernels are not Python functions.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

DEPTH = 64
"""Inner columns per iteration, always."""
FEW_ROWS = 256
"""Up to so many rows small tiles keep more multiprocessors busy. Tiles of both sizes have the same bits: an output is
summed by the same instructions in the same order, whatever lies beside it in its tile."""


def exact_product(hidden_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> Tensor:
    """hidden @ weight.T + bias, summed in float32 and rounded once to the dtype. Without gradient."""
    hidden_TD = hidden_TD if hidden_TD.stride(1) == 1 else hidden_TD.contiguous()
    weight_OD = weight_OD if weight_OD.stride(1) == 1 else weight_OD.contiguous()
    assert hidden_TD.dtype == weight_OD.dtype
    num_rows, width = hidden_TD.shape
    outputs = len(weight_OD)
    output_TO = torch.empty(num_rows, outputs, dtype=dtype, device=hidden_TD.device)
    options = launch_options(num_rows, hidden_TD.dtype)
    grid = (triton.cdiv(num_rows, options["ROWS"]), triton.cdiv(outputs, options["OUTPUTS"]))
    if num_rows:
        _product_kernel[grid](
            hidden_TD, weight_OD, bias_O, output_TO, num_rows, outputs, width, hidden_TD.stride(0),
            weight_OD.stride(0), DEPTH=DEPTH, IS_EVEN=width % DEPTH == 0, **options,
        )  # fmt: skip
    return output_TO


def exact_linear(hidden_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
    """hidden @ weight.T + bias in the dtype of the states; the gradient is the library's."""
    if torch.is_grad_enabled():
        return _ExactLinear.apply(hidden_TD, weight_OD, bias_O)
    return exact_product(hidden_TD, weight_OD, bias_O, hidden_TD.dtype)


def launch_options(num_rows: int, dtype: torch.dtype) -> dict[str, Any]:
    if dtype == torch.float32:  # tensor cores do not multiply it exactly, and large tiles of it do not fit
        return {"ROWS": 32, "OUTPUTS": 32, "PRECISION": "ieee", "num_warps": 4, "num_stages": 2}
    if num_rows <= FEW_ROWS:
        return {"ROWS": 64, "OUTPUTS": 64, "PRECISION": "tf32", "num_warps": 4, "num_stages": 4}
    return {"ROWS": 128, "OUTPUTS": 128, "PRECISION": "tf32", "num_warps": 8, "num_stages": 4}


class _ExactLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden_TD, weight_OD)
        return exact_product(hidden_TD, weight_OD, bias_O, hidden_TD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_OD = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            grad_TO @ weight_OD if wants_hidden else None,
            grad_TO.t() @ hidden_TD if wants_weight else None,
            grad_TO.sum(0) if wants_bias else None,
        )


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    hidden, weight, bias, output, num_rows, outputs, width, hidden_stride, weight_stride,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, IS_EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile. Neighbouring programs share their part of the weight."""
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place_O = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row_R, is_output_O = row_R < num_rows, place_O < outputs
    column_D = tl.arange(0, DEPTH)
    hidden_RD = hidden + row_R[:, None] * hidden_stride + column_D[None, :]
    weight_DO = weight + place_O[None, :] * weight_stride + column_D[:, None]
    sum_RO = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, width, DEPTH):
        if IS_EVEN:
            left = tl.load(hidden_RD, mask=is_row_R[:, None], other=0.0)
            right = tl.load(weight_DO, mask=is_output_O[None, :], other=0.0)
        else:
            is_inside_D = start + column_D < width
            left = tl.load(hidden_RD, mask=is_row_R[:, None] & is_inside_D[None, :], other=0.0)
            right = tl.load(weight_DO, mask=is_output_O[None, :] & is_inside_D[:, None], other=0.0)
        sum_RO = tl.dot(left, right, sum_RO, input_precision=PRECISION)
        hidden_RD += DEPTH
        weight_DO += DEPTH
    if bias is not None:
        sum_RO += tl.load(bias + place_O, mask=is_output_O, other=0.0).to(tl.float32)[None, :]
    target = output + row_R[:, None] * outputs + place_O[None, :]
    tl.store(target, sum_RO.to(output.dtype.element_ty), mask=is_row_R[:, None] & is_output_O[None, :])
