"""What stands before the projections of a layer, by the form in which they read their states.

Float8 matrices read float8 rows: on a GPU the kernel that makes the rows quantises them too, because another kernel for
that would read and write them once more. Both ways give the same codes and scales.
Owns: norm and gated activation in either form. Refuses: attention's output, which float8_linear quantises itself.
Shapes: _T packed tokens, _D width, _F width of the feed-forward layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from temper.models.float8.arithmetic import Float8Rows, has_float8, quantize_rows
from temper.models.ops import Ops

States = Tensor | Float8Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    add_norm: Callable[[Tensor | None, Tensor, Tensor, float], tuple[States, Tensor]]
    """(x, residual, weight, epsilon) -> norm of the sum, and the sum. No x: the residual is the sum."""
    silu_mul: Callable[[Tensor], States]
    """[T, 2F]: gate and up side by side -> [T, F]."""


@cache
def plain_inputs(ops: Ops) -> Inputs:
    """States as they are."""

    def add_norm(x_TD: Tensor | None, residual_TD: Tensor, weight_D: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        if x_TD is None:
            return ops.rms_norm(residual_TD, weight_D, epsilon), residual_TD
        return ops.add_rms_norm(x_TD, residual_TD, weight_D, epsilon)

    return Inputs(add_norm=add_norm, silu_mul=ops.silu_mul)


@cache
def float8_inputs(ops: Ops) -> Inputs:
    """The same states, quantised. Without gradient."""
    plain = plain_inputs(ops)

    def add_norm(
        x_TD: Tensor | None, residual_TD: Tensor, weight_D: Tensor, epsilon: float
    ) -> tuple[Float8Rows, Tensor]:
        if has_float8(residual_TD.device):
            from temper.models.kernels.norms import add_rms_norm_float8  # triton is there with a GPU only

            codes_and_scale, summed_TD = add_rms_norm_float8(x_TD, residual_TD, weight_D, epsilon)
            return Float8Rows(*codes_and_scale, residual_TD.dtype), summed_TD
        normed_TD, summed_TD = plain.add_norm(x_TD, residual_TD, weight_D, epsilon)
        assert isinstance(normed_TD, Tensor)
        return Float8Rows(*quantize_rows(normed_TD), normed_TD.dtype), summed_TD

    def silu_mul(gate_up_T2F: Tensor) -> Float8Rows:
        if has_float8(gate_up_T2F.device):
            from temper.models.kernels.swiglu import silu_mul_float8

            return Float8Rows(*silu_mul_float8(gate_up_T2F), gate_up_T2F.dtype)
        return Float8Rows(*quantize_rows(ops.silu_mul(gate_up_T2F)), gate_up_T2F.dtype)

    return Inputs(add_norm=add_norm, silu_mul=silu_mul)
