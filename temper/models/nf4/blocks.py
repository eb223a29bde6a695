"""The NF4 format of QLoRA (arXiv:2305.14314): 16 levels at quantiles of a normal distribution, one scale per 64 values.

Scales are bfloat16: 4.25 bits a value. Scales that are quantised themselves (4.127 bits) would save 0.1 GB of a 7B
model and cost a second table and a second rounding in every pass.
Owns: to codes and back. Refuses: knowing layers (layers.py).
Shapes: _BC blocks and the codes of one, _B blocks, _N values of a tensor from the first to the last.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 64
"""Values that share a scale, in the order in which they lie in memory."""
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Appendix E of the paper. Zero is a level, so that what is zero stays zero."""
CHUNK_BLOCKS = 1 << 16
"""Blocks that are quantised at once: a large layer would need eight times its size in temporary tensors."""


def quantise(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [B, BLOCK / 2] and scales [B] of a tensor of any shape: each value becomes the nearest level of its block.

    A byte holds the values i (lower half) and i + BLOCK / 2 of its block, so that both halves of a block are written
    end to end when they are read. The last block is filled up with zeros.
    """
    flat_N = tensor.detach().reshape(-1)
    values_BV = functional.pad(flat_N, (0, -len(flat_N) % BLOCK)).view(-1, BLOCK)
    parts = [_quantise_blocks(part) for part in torch.split(values_BV, CHUNK_BLOCKS)]
    return torch.cat([codes for codes, _ in parts]), torch.cat([scales for _, scales in parts])


def _quantise_blocks(values_BV: Tensor) -> tuple[Tensor, Tensor]:
    wide = values_BV.float()
    scales_B = wide.abs().amax(1).bfloat16()
    # Relative to the scale as it is held, not as it was measured: nearest then means nearest.
    held_B1 = scales_B.float().unsqueeze(1)
    middles = ((table("cpu")[1:] + table("cpu")[:-1]) / 2).to(wide.device)
    codes_BV = torch.bucketize(wide / torch.where(held_B1 == 0, 1.0, held_B1), middles, out_int32=True).byte()
    lower, upper = codes_BV.chunk(2, dim=1)
    return lower | (upper << 4), scales_B


def dequantise(codes_BC: Tensor, scales_B: Tensor, out: Tensor) -> Tensor:
    """level x scale in float32, rounded once, written to `out` (contiguous); returns it."""
    assert out.is_contiguous(), "values are written in the order in which they lie in memory"
    assert len(codes_BC) == len(scales_B) == -(-out.numel() // BLOCK), "these are the codes of another tensor"
    if out.is_cuda:
        from temper.models.kernels.nf4 import dequantise_blocks

        dequantise_blocks(codes_BC, scales_B, table(out.device), out)
        return out
    codes_BV = torch.cat((codes_BC & 15, codes_BC >> 4), dim=1)
    values_BV = table("cpu")[codes_BV.int()] * scales_B.float().unsqueeze(1)
    out.view(-1).copy_(values_BV.view(-1)[: out.numel()])
    return out


@cache
def table(device: torch.device | str) -> Tensor:
    """The levels, kept on the device: a copy from the host has no place in a recorded step."""
    return torch.tensor(LEVELS, device=device)
