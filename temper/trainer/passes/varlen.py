"""Attention of packed rows as they lie, by torch's flash kernel for rows of any lengths: no slot is padded.

Owns: when there is such a kernel, and how it is called. Refuses: float32 and CPUs, where packed_attention.py pads.
Shapes: _T packed tokens, _S1 where rows start, and the end; H heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

WIDEST_HEAD = 256
HEAD_MULTIPLE = 8
"""Head sizes that the kernel takes as they are."""


def has_kernel(query: Tensor) -> bool:
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and is_half and query.shape[-1] <= WIDEST_HEAD and query.shape[-1] % HEAD_MULTIPLE == 0


def varlen_attention(
    query_THD: Tensor,
    key: Tensor,
    value: Tensor,
    starts_S1: Tensor,
    *,
    longest: int,
    scaling: float,
    window: int | None,
) -> Tensor:
    """Causal attention within rows [T, H, D]; key and value may have fewer heads. starts: int32, on the device.

    torch's own operator: torch.nn.attention.varlen wraps it, with other arguments in each version, and behind a node of
    autograd that order_gradients could not tell.
    """
    output_THD: Tensor = torch.ops.aten._flash_attention_forward(
        query_THD, key, value, starts_S1, starts_S1, longest, longest, 0.0, True, False, scale=scaling,
        window_size_left=None if window is None else window - 1, window_size_right=None if window is None else 0,
    )[0]  # fmt: skip
    return output_THD
