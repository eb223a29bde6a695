"""The optimiser's state in a checkpoint: files of bounded size, written and read a part at a time.

Owns: their names. Refuses: what is in them. At no time is all of it in memory once more: of 7 billion parameters it
would be 90 GB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FILE_BYTES = 4 << 30
"""Tensors of one file together, but for a single larger one."""


def write_tensors(tensors: Mapping[str, Tensor], folder: Path, stem: str) -> None:
    """STEM.safetensors, and as many of STEM-2.safetensors, ... as are needed. Each tensor is asked for once."""
    for path, batch in batches_of(tensors, folder, stem):
        save_file({name: tensor.contiguous() for name, tensor in batch.items()}, path)


def read_tensors(folder: Path, stem: str) -> Mapping[str, Tensor]:
    """What write_tensors wrote, each tensor read when it is asked for."""
    return _StoredTensors(folder, stem)


class _StoredTensors(Mapping[str, Tensor]):
    def __init__(self, folder: Path, stem: str) -> None:
        self._files: dict[str, Any] = {}
        number = 0
        while number == 0 or _path(folder, stem, number).is_file():
            file: Any = safe_open(_path(folder, stem, number), framework="pt")
            self._files |= dict.fromkeys(file.keys(), file)
            number += 1

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def batches_of(tensors: Mapping[str, Tensor], folder: Path, stem: str) -> Iterator[tuple[Path, dict[str, Tensor]]]:
    """What goes into which file. At least one, which may be empty."""
    batch: dict[str, Tensor] = {}
    size = number = 0
    for name in tensors:
        tensor = tensors[name]
        own = tensor.numel() * tensor.element_size()
        if batch and size + own > FILE_BYTES:
            yield _path(folder, stem, number), batch
            batch, size, number = {}, 0, number + 1
        batch[name] = tensor
        size += own
    yield _path(folder, stem, number), batch


def _path(folder: Path, stem: str, number: int) -> Path:
    return folder / (f"{stem}-{number + 1}.safetensors" if number else f"{stem}.safetensors")
