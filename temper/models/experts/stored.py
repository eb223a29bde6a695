"""Matrices of experts as checkpoints hold them, one file entry each, under the names of the model, which stacks them.

Owns: these names, and reading the rows of some experts alone. Refuses: families whose layers are not walked.
Shapes: E experts, _F width of an expert, _D width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from temper.folders.stored import StoredTensors

ONE = re.compile(r"(?P<layer>.+)\.(mlp|block_sparse_moe)\.experts\.(?P<expert>\d+)\.(?P<matrix>\w+)\.weight")
ROUTER = ".block_sparse_moe.gate."
"""Mixtral's name of what is ".mlp.gate." in the model."""
PLACES = {
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", 0),
    "w1": ("gate_up_proj", 0), "w3": ("gate_up_proj", 1), "w2": ("down_proj", 0),
}  # fmt: skip
"""By name of an expert's matrix: the stack that it is in, and its place among those of one expert."""


class StackedExperts:
    """Looks like a tensor [E, ...] as far as its shape and slices of rows go; only these experts are then read."""

    def __init__(self, read: Callable[[str], Tensor], names: Sequence[Sequence[str]]) -> None:
        """names: by expert, its matrices, which lie one below the other."""
        self._read, self._names = read, names

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self), *self._expert(0).shape))

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, rows: slice) -> Tensor:
        experts = [self._expert(number) for number in range(*rows.indices(len(self)))]
        return torch.stack(experts) if experts else self._expert(0).new_empty(0, *self._expert(0).shape)

    def _expert(self, number: int) -> Tensor:
        return torch.cat([self._read(name) for name in self._names[number]])


class StoredWeights(StoredTensors):
    """Tensors of a directory under the names of the model."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._single: dict[str, str] = {}
        """By name in the model, the name in the files."""
        self._stacks: dict[str, dict[int, dict[int, str]]] = {}
        """By name in the model and by expert, the names of its matrices at their places."""
        for name in self._files:
            if (found := ONE.fullmatch(name)) is None or found["matrix"] not in PLACES:
                self._single[name.replace(ROUTER, ".mlp.gate.")] = name
                continue
            stack, place = PLACES[found["matrix"]]
            experts = self._stacks.setdefault(f"{found['layer']}.mlp.experts.{stack}", {})
            experts.setdefault(int(found["expert"]), {})[place] = name

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._stacks:
            return super().__getitem__(self._single[name])
        experts = self._stacks[name]
        names = [[experts[number][place] for place in sorted(experts[number])] for number in sorted(experts)]
        return cast(Tensor, StackedExperts(super().__getitem__, names))  # rows are all that is taken over of it

    def __iter__(self) -> Iterator[str]:
        yield from self._single
        yield from self._stacks

    def __len__(self) -> int:
        return len(self._single) + len(self._stacks)
