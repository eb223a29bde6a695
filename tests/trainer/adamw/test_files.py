"""The optimiser's state in files of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from temper.trainer.adamw import files
from temper.trainer.adamw.files import read_tensors, write_tensors


class Counted(Mapping[str, Tensor]):
    """Tensors of 400 bytes that count how often they were made."""

    def __init__(self, names: str) -> None:
        self.made = dict.fromkeys(names, 0)

    def __getitem__(self, name: str) -> Tensor:
        self.made[name] += 1
        return torch.full((10, 10), float(ord(name)))

    def __iter__(self) -> Iterator[str]:
        return iter(self.made)

    def __len__(self) -> int:
        return len(self.made)


@pytest.mark.parametrize(("limit", "num_files"), [(1 << 30, 1), (1000, 3), (1, 5)])
def test_tensors_come_back_from_as_many_files_as_are_needed(
    limit: int, num_files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "FILE_BYTES", limit)
    tensors = Counted("abcde")
    write_tensors(tensors, tmp_path, "optimizer")
    assert set(tensors.made.values()) == {1}, "each is made once: making it may take a gigabyte"
    assert len(list(tmp_path.iterdir())) == num_files
    assert (tmp_path / "optimizer.safetensors").is_file()
    found = read_tensors(tmp_path, "optimizer")
    assert sorted(found) == list("abcde")
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_no_tensors_are_a_file_too(tmp_path: Path) -> None:
    write_tensors({}, tmp_path, "optimizer")
    assert dict(read_tensors(tmp_path, "optimizer")) == {}
