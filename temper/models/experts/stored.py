"""Matrices of experts as checkpoints hold them, one file entry each, under the names of the model, which stacks them.

Owns: these names in both directions, and reading the rows of some experts alone. Refuses: families whose layers are not
walked.
Shapes: E experts, _F width of an expert, _D width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
MIXTRAL = "mixtral"
"""The family whose files have names of their own; all others have those that begin PLACES."""
STACK = re.compile(r"(?P<layer>.+)\.mlp\.experts\.(?P<stack>gate_up_proj|down_proj)")


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """One tensor of a file: a stretch of bytes of one of the model's."""

    source: str
    outline: Tensor
    start: int = 0
    """Its first byte in the source."""


def stored_entries(outlines: Mapping[str, Tensor], family: str) -> dict[str, StoredEntry]:
    """What save_pretrained makes of tensors with these names and shapes, by its names."""
    is_mixtral, made = family == MIXTRAL, {}
    for name, outline in outlines.items():
        if (found := STACK.fullmatch(name)) is None:
            made[name.replace(".mlp.gate.", ROUTER) if is_mixtral else name] = StoredEntry(name, outline)
            continue
        block = "block_sparse_moe" if is_mixtral else "mlp"
        matrices = [
            own for own, (stack, _) in PLACES.items() if stack == found["stack"] and (own[0] == "w") == is_mixtral
        ]
        experts, rows, width = outline.shape
        part = outline.new_empty(rows // len(matrices), width)
        for at in range(experts * len(matrices)):
            expert, place = divmod(at, len(matrices))
            entry = f"{found['layer']}.{block}.experts.{expert}.{matrices[place]}.weight"
            made[entry] = StoredEntry(name, part, at * part.nbytes)
    return made


def as_stored(tensors: Mapping[str, Tensor], family: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a model under the names of its files; a matrix of an expert is a view of its stack."""
    for name, entry in stored_entries(tensors, family).items():
        whole, part = tensors[entry.source], entry.outline
        yield name, whole if whole is part else whole.view(-1, *part.shape)[entry.start // part.nbytes]


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
