"""Attention of long rows one by one, on a GPU: by cuDNN's kernels, or with a fixed order of sums by the flash kernel.

On an H200 (12 query heads, 2 key heads of 128, four rows of 8,192 tokens) the flash kernel over all rows takes 2.5 ms
forward and 7.4 ms backward; with its sums in a fixed order 12.8 ms backward, and 9.3 ms row by row. cuDNN's kernels
take 1.3 and 3.9 ms. They have no fixed order, and are planned for each length, which takes 0.15 s: rows are padded, on
the right, to one of few lengths.
Owns: which rows are long, lengths that are planned for. Refuses: sliding windows, short rows (varlen.py).
Shapes: _L tokens of a row, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

LONG = 2048
LONG_ORDERED = 4096
"""Shorter rows do not fill a GPU alone, or not with the flash kernel."""
SIZES_PER_OCTAVE = 16
"""A row is padded by a sixteenth at most, and rows of 2,048 to 32,768 tokens have 64 lengths."""


class Segment(NamedTuple):
    """Neighbouring rows that are attended to together: one long row, or any number of short ones."""

    lengths: tuple[int, ...]
    is_long: bool


def cut_at_long_rows(lengths: Sequence[int], *, is_ordered: bool) -> list[Segment]:
    """All rows in order: each long one alone, those between them together."""
    long = LONG_ORDERED if is_ordered else LONG
    segments: list[Segment] = []
    for is_long, group in groupby(lengths, lambda length: length >= long):
        together = tuple(group)
        segments += [Segment((length,), True) for length in together] if is_long else [Segment(together, False)]
    return segments


def planned_length(length: int) -> int:
    """The next length that kernels are planned for."""
    step = max(1, (1 << (length - 1).bit_length()) // (2 * SIZES_PER_OCTAVE))
    return -(-length // step) * step


def attend_row(query_LHD: Tensor, key: Tensor, value: Tensor, *, scaling: float, is_ordered: bool) -> Tensor:
    """Causal attention of one row; key and value may have fewer heads. Any device; kernels are chosen on a GPU."""
    length, is_grouped = len(query_LHD), query_LHD.shape[1] != key.shape[1]
    by_cudnn = not is_ordered and _has_cudnn(query_LHD, key, value)
    room = planned_length(length) - length if by_cudnn else 0
    # What is padded comes last: no token sees it, and its own output is cut off.
    padded = (pad(tensor, (0, 0, 0, 0, 0, room)) if room else tensor for tensor in (query_LHD, key, value))
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in padded)
    flash = SDPBackend.FLASH_ATTENTION
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, flash] if by_cudnn else [flash], set_priority=True):
        output_BHLD = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=is_grouped)
    output_LHD = output_BHLD[0].transpose(0, 1)
    return output_LHD[:length] if room else output_LHD


def _has_cudnn(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """From Hopper on its kernels are the faster ones."""
    if not query.is_cuda or torch.cuda.get_device_capability(query.device) < (9, 0):
        return False
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    is_grouped = query.shape[1] != key.shape[1]
    return can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, True, is_grouped))
