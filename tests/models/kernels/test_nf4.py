"""The kernel that makes weights of codes: the bits of the plain function, also where the last block is cut."""

from __future__ import annotations

import pytest
import torch

from temper.models.kernels.nf4 import dequantise_blocks
from temper.models.nf4.blocks import dequantise, quantise, table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 64), (5, 100), (1, 7), (40, 192)])
def test_weights_are_those_of_the_plain_function(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    codes, scales = quantise(weight)
    plain = dequantise(codes, scales, torch.empty(shape, dtype=dtype))
    room = torch.full((shape[0] * shape[1] + 8,), 7.0, dtype=dtype, device=device)
    out = room[:-8].view(shape)
    dequantise_blocks(codes.to(device), scales.to(device), table("cpu").to(device), out)
    assert torch.equal(out.cpu(), plain)
    assert (room[-8:] == 7).all(), "what lies behind is not written"
    # Codes of two places exchanged are seen.
    dequantise_blocks(codes.flip(1).contiguous().to(device), scales.to(device), table("cpu").to(device), out)
    assert not torch.equal(out.cpu(), plain)
