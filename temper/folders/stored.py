"""Tensors of a Hugging Face directory, one by one and without a model.

Owns: finding them in their files. Refuses: names that transformers would change, and precision (whoever copies them).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

INDEX, ALONE = "model.safetensors.index.json", "model.safetensors"


class StoredTensors(Mapping[str, Tensor]):
    """Tensors of a Hugging Face directory by name, each mapped from its file when it is asked for. Empty where there
    are none in safetensors."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, str] = {}
        if (folder / INDEX).is_file():
            self._files = json.loads((folder / INDEX).read_text())["weight_map"]
        elif (folder / ALONE).is_file():
            with safe_open(folder / ALONE, "pt") as file:
                self._files = dict.fromkeys(file.keys(), ALONE)

    def fits(self, wanted: Mapping[str, Tensor]) -> bool:
        """Whether every tensor is here, by this name and of this shape."""
        return wanted.keys() <= self.keys() and all(self[name].shape == tensor.shape for name, tensor in wanted.items())

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._folder / self._files[name], "pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
