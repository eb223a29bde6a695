"""Linear layers in float8: weights with a scale per output channel, states with a scale per row made on the way.

Owns: quantising, and the product of two quantised matrices, on a GPU that has one and emulated elsewhere. Refuses:
gradients; a trainer computes in the precision of its model.
float8_e4m3fn has 4 significant bits and reaches from 2^-9 to 448: a row is divided by its largest entry over 448, so
nothing overflows, and each entry is then off by at most 1/16 of itself, or of 2^-6 where it is smaller than that.
Shapes: _T packed tokens, _D width in, _O width out.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
LEAST_SCALE = 1e-12
"""Rows of zeros have a scale too."""
WHOLE = 16
"""Widths must be multiples of this for the GPU's product."""


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x / scale in float8, scale [rows, 1] in float32) of a matrix, row by row."""
    if x.is_cuda:
        from temper.models.kernels.float8 import quantize_rows as on_gpu  # triton is there with a GPU only

        return on_gpu(x)
    return spelled_quantize_rows(x)


def spelled_quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """What the kernel computes, in torch's words."""
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=LEAST_SCALE)
    # Clamped: the largest entry over its own scale may round to a little more than 448, which is NaN in float8.
    return (wide / scale).clamp(-LARGEST, LARGEST).to(FLOAT8), scale


def float8_linear(hidden_TD: Tensor, weight_OD: Tensor, scale_O: Tensor, bias_O: Tensor | None) -> Tensor:
    """hidden @ (scale * weight).T + bias, with the states quantised row by row; in the dtype of the states."""
    rows_TD, scale_T1 = quantize_rows(hidden_TD)
    if _can_multiply(hidden_TD, weight_OD):
        return _device_product(rows_TD, scale_T1, weight_OD, scale_O, bias_O, hidden_TD.dtype)
    product_TO = rows_TD.float() @ weight_OD.float().t() * scale_T1 * scale_O
    product_TO = product_TO if bias_O is None else product_TO + bias_O.float()
    return product_TO.to(hidden_TD.dtype)


def _device_product(
    rows_TD: Tensor, scale_T1: Tensor, weight_OD: Tensor, scale_O: Tensor, bias_O: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Row-wise scales come with results in bfloat16 only; other dtypes are made from those."""
    bias_O = None if bias_O is None else bias_O.to(torch.bfloat16)
    out_TO = torch._scaled_mm(
        rows_TD, weight_OD.t(), scale_a=scale_T1, scale_b=scale_O.view(1, -1), bias=bias_O, out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )  # fmt: skip
    return out_TO.to(dtype)


def _can_multiply(hidden_TD: Tensor, weight_OD: Tensor) -> bool:
    return hidden_TD.is_cuda and _has_products(hidden_TD.device) and not any(n % WHOLE for n in weight_OD.shape)


@cache
def _has_products(device: torch.device) -> bool:
    """Compute capability 8.9 (Ada) and 9.0 (Hopper) brought products of float8."""
    return torch.cuda.get_device_capability(device) >= (8, 9)
