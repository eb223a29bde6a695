"""Roots rounded to the nearest, also those of the smallest and the largest numbers."""

from __future__ import annotations

import torch

from temper.trainer.adamw.roots import rounded_root


def test_roots_are_those_of_float64_rounded() -> None:
    """A float32 root is never so near the middle of two that float64 could choose the wrong one."""
    draw = torch.Generator().manual_seed(0)
    values = torch.cat([torch.rand(100_000, generator=draw), 10 ** (76 * torch.rand(100_000, generator=draw) - 38)])
    values[:4] = torch.tensor([0.0, 1e-45, 3e-39, 3.4e38])
    exact = values.double().sqrt().float()
    assert torch.equal(rounded_root(values), exact)
    if torch.cuda.is_available():
        assert torch.equal(rounded_root(values.cuda()).cpu(), exact)
    # What this looks for is seen: one root that is a unit off.
    exact[7] = torch.nextafter(exact[7], torch.tensor(2.0))
    assert not torch.equal(rounded_root(values), exact)
