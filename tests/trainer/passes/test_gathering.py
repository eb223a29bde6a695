"""Taking and placing rows equal plain indexing, in value and gradient."""

from __future__ import annotations

import torch

from temper.trainer.passes.gathering import place_rows, take_rows


def test_taking_rows_equals_indexing() -> None:
    index = torch.tensor([3, 0, 2])
    source = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.equal(take_rows(source, index), source[index])
    assert torch.autograd.gradcheck(lambda x: take_rows(x, index), source)


def test_placing_rows_is_the_inverse_and_zero_elsewhere() -> None:
    index = torch.tensor([3, 0, 2])
    source = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    placed = place_rows(source, index, 5)
    assert torch.equal(placed[index], source)
    assert not placed[[1, 4]].any()
    assert torch.autograd.gradcheck(lambda x: place_rows(x, index, 5), source)
