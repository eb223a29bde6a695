"""Whole tensors of a cut model come a few at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from temper.trainer.ranks import parts
from temper.trainer.ranks.parts import GatheredTensors

TENSORS = {name: torch.full((size,), float(size)) for name, size in (("a", 4), ("b", 4), ("c", 40), ("d", 2))}


def test_neighbours_are_gathered_together_and_a_large_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "GATHERED_BYTES", 32)
    asked: list[Sequence[str]] = []

    def gather(names: Sequence[str]) -> dict[str, Tensor]:
        asked.append(names)
        return {name: TENSORS[name] for name in names}

    gathered = GatheredTensors(TENSORS, gather)
    assert list(gathered) == list(TENSORS)
    assert {name: len(tensor) for name, tensor in gathered.items()} == {"a": 4, "b": 4, "c": 40, "d": 2}
    assert asked == [["a", "b"], ["c"], ["d"]]
    assert len(gathered["b"]) == 4, "in any order"


def test_outlines_have_shapes_and_types_and_no_memory() -> None:
    outlines = GatheredTensors(TENSORS, lambda names: {}).outlines()
    assert {name: (t.shape, t.dtype, t.device) for name, t in outlines.items()} == {
        name: (t.shape, t.dtype, t.device) for name, t in TENSORS.items()
    }
    assert all(outline.untyped_storage().nbytes() <= 4 for outline in outlines.values())
