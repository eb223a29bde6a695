"""Whole tensors of a cut model come a few at a time."""

from __future__ import annotations

import asyncio
import gc
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


@pytest.mark.parametrize(
    ("pace", "most"), [((1, 1, 1, 1), 1.0), ((1, 2, 3, 5), 4.0)], ids=["in step", "each in its own"]
)
def test_readers_side_by_side_gather_the_model_no_more_than_once_each(
    pace: tuple[int, ...], most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "GATHERED_BYTES", 64)
    tensors = {f"t{number}": torch.full((4,), float(number)) for number in range(40)}
    gathered_bytes = 0

    def gather(names: Sequence[str]) -> dict[str, Tensor]:
        nonlocal gathered_bytes
        gathered_bytes += sum(tensors[name].nbytes for name in names)
        return {name: tensors[name].clone() for name in names}

    gathered = GatheredTensors(tensors, gather)

    async def read(turns: int) -> None:
        for name, tensor in tensors.items():
            assert torch.equal(gathered[name], tensor)
            for _ in range(turns):
                await asyncio.sleep(0)

    async def read_all() -> None:
        await asyncio.gather(*map(read, pace))

    asyncio.run(read_all())
    assert gathered_bytes / sum(tensor.nbytes for tensor in tensors.values()) <= most
    gc.collect()
    assert not gathered._held, "nothing is held for those who have read"


def test_outlines_have_shapes_and_types_and_no_memory() -> None:
    outlines = GatheredTensors(TENSORS, lambda names: {}).outlines()
    assert {name: (t.shape, t.dtype, t.device) for name, t in outlines.items()} == {
        name: (t.shape, t.dtype, t.device) for name, t in TENSORS.items()
    }
    assert all(outline.untyped_storage().nbytes() <= 4 for outline in outlines.values())
