"""Linear layers in float8: weights with a scale per output channel, states with a scale per row made on the way.

Owns: quantising, and the product of two quantised matrices, on a GPU that has one and emulated elsewhere. Refuses:
gradients; a trainer computes in the precision of its model.
float8_e4m3fn has 4 significant bits and reaches from 2^-9 to 448: a row is divided by its largest entry over 448, so
nothing overflows, and each entry is then off by at most 1/16 of itself, or of 2^-6 where it is smaller than that.
Shapes: _T packed tokens, _D width in, _O width out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from temper.models.float8.tiles import tiles_of

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
LEAST_SCALE = 1e-12
"""Rows of zeros have a scale too."""
WHOLE = 16
"""Widths must be multiples of this for the GPU's product."""
HOPPER = 9
"""The compute capability, before its point, that tiles.py is made for; others have less shared memory."""


@dataclass(frozen=True, slots=True)
class Float8Rows:
    """States as a product takes them: they stand for codes * scale."""

    codes_TD: Tensor
    scale_T1: Tensor
    dtype: torch.dtype
    """That of the states before they were quantised, in which products with them are given."""


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x / scale in float8, scale [rows, 1] in float32) of a matrix, row by row."""
    if has_float8(x.device):
        from temper.models.kernels.float8 import quantize_rows as on_gpu  # triton is there with a GPU only

        return on_gpu(x)
    return spelled_quantize_rows(x)


def spelled_quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """What the kernel computes, in torch's words."""
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=LEAST_SCALE)
    # Times the reciprocal: a kernel divides once a row. The largest entry may come out a little above 448, whence it
    # rounds to 448; only from 464 on it would be NaN.
    return (wide * (1.0 / scale)).to(FLOAT8), scale


def float8_linear(states_TD: Tensor | Float8Rows, weight_OD: Tensor, scale_O: Tensor, bias_O: Tensor | None) -> Tensor:
    """states @ (scale * weight).T + bias, with the states quantised row by row; in the dtype of the states."""
    rows = states_TD
    if isinstance(rows, Tensor):
        rows = Float8Rows(*quantize_rows(rows), rows.dtype)
    if _can_multiply(weight_OD):
        return _device_product(rows, weight_OD, scale_O, bias_O)
    product_TO = rows.codes_TD.float() @ weight_OD.float().t() * rows.scale_T1 * scale_O
    product_TO = product_TO if bias_O is None else product_TO + bias_O.float()
    return product_TO.to(rows.dtype)


def _device_product(rows: Float8Rows, weight_OD: Tensor, scale_O: Tensor, bias_O: Tensor | None) -> Tensor:
    tiles = tiles_of(len(rows.codes_TD), *weight_OD.shape)
    if tiles is not None and _capability(weight_OD.device)[0] == HOPPER:
        from temper.models.kernels.float8_products import few_rows_product  # triton is there with a GPU only

        return few_rows_product(rows.codes_TD, rows.scale_T1, weight_OD, scale_O, bias_O, rows.dtype, tiles)
    # Row-wise scales come with results in bfloat16 only; other dtypes are made from those.
    out_TO = torch._scaled_mm(
        rows.codes_TD, weight_OD.t(), scale_a=rows.scale_T1, scale_b=scale_O.view(1, -1),
        bias=None if bias_O is None else bias_O.to(torch.bfloat16), out_dtype=torch.bfloat16, use_fast_accum=True,
    )  # fmt: skip
    return out_TO.to(rows.dtype)


def _can_multiply(weight_OD: Tensor) -> bool:
    return has_float8(weight_OD.device) and not any(n % WHOLE for n in weight_OD.shape)


def has_float8(device: torch.device) -> bool:
    """Whether it rounds to float8 and multiplies it: GPUs from Ada and Hopper on. Elsewhere torch's words are used."""
    return device.type == "cuda" and _capability(device) >= (8, 9)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
