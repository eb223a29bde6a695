"""Tensors are found on the other side where they were put, whole and unchanged."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from temper.engine.process.device_weights import DeviceReader, DeviceWriter
from temper.engine.process.weights import SharedWeights, anonymous_file
from temper.errors import BackendError
from temper.types import Publication


def awkward() -> dict[str, Tensor]:
    """Types, sizes and layouts that are easy to get wrong."""
    block = torch.arange(60, dtype=torch.float32).view(6, 10)
    return {
        "odd": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "half": torch.randn(5, 3).to(torch.bfloat16),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.zeros(0, 7),
        "turned": torch.arange(12, dtype=torch.float32).view(3, 4).T,
        "first": block[:2],
        "second": block[2:],
        "eighth": torch.randn(4, 4).to(torch.float8_e4m3fn),
    }


def equal(ours: Tensor, theirs: Tensor) -> bool:
    a, b = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (ours, theirs))
    return ours.shape == theirs.shape and ours.dtype == theirs.dtype and torch.equal(a, b)


def sides() -> tuple[SharedWeights, SharedWeights]:
    descriptor = anonymous_file()
    return SharedWeights(descriptor), SharedWeights(os.dup(descriptor))


def test_everything_arrives_and_later_publications_may_be_larger() -> None:
    ours, theirs = sides()
    tensors = awkward()
    for version in range(3):
        got = theirs.read(ours.write(Publication(version=version, tensors=tensors)))
        assert (got.version, list(got.tensors)) == (version, list(tensors)), "in the same order"
        assert all(equal(tensors[name], got.tensors[name]) for name in tensors)
        tensors = {**tensors, f"more {version}": torch.randn(5000)}
    ours.close()
    theirs.close()


def test_a_reader_that_comes_later_gets_what_was_published_and_not_what_the_trainer_has_made_of_it() -> None:
    ours, theirs = sides()
    weight = torch.zeros(3)
    publication = Publication(version=1, tensors={"a": weight})
    first = ours.write(publication)
    weight += 1.0  # the next step has begun
    assert ours.write(publication) == first
    assert theirs.read(first).tensors["a"].tolist() == [0.0, 0.0, 0.0]
    assert theirs.read(ours.write(Publication(version=2, tensors={"a": weight}))).tensors["a"].tolist() == [1.0] * 3
    ours.close()
    theirs.close()


def test_memory_that_is_too_small_is_refused() -> None:
    ours, theirs = sides()
    told = ours.write(Publication(version=1, tensors=awkward()))
    with pytest.raises(BackendError, match=r"bytes, and .* arrived"):
        theirs.read({**told, "size": 10**6})
    name, _, kind, start = told["tensors"][0]
    with pytest.raises(BackendError, match="outside of the weights"):
        theirs.read({**told, "tensors": [[name, [10**5], kind, start]]})


class Handles:
    """Takes the place of CUDA IPC: a number for each storage."""

    def __init__(self) -> None:
        self.flats: list[Tensor] = []

    def share(self, flat: Tensor) -> list[Any]:
        self.flats.append(flat)
        return [len(self.flats) - 1]

    def open(self, told: list[Any]) -> Tensor:
        return self.flats[told[0]]


def test_a_storage_is_shared_once_however_many_tensors_and_publications_it_has() -> None:
    handles, tensors = Handles(), awkward()
    writer, reader = DeviceWriter(handles.share), DeviceReader(handles.open)
    for version in range(3):
        for tensor in tensors.values():
            if tensor.dtype == torch.float32:
                tensor += 1
        got = reader.read(writer.write(Publication(version=version, tensors=tensors)))
        assert all(equal(tensors[name], got[name]) for name in tensors)
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    assert len(handles.flats) == len(storages) < len(tensors)


def test_weights_that_are_made_for_a_publication_are_kept_where_they_can_be_read() -> None:
    """Merged weights of an adapter: a new tensor each time, gone when its publication is."""
    handles, own = Handles(), {"plain": torch.ones(3), "merged": torch.zeros(4)}
    writer, reader = DeviceWriter(handles.share), DeviceReader(handles.open)
    for version in range(3):
        tensors = {**own, "merged": own["merged"] + version}
        told = writer.write(Publication(version=version, tensors=tensors, alike=own))
        tensors["merged"].fill_(-1)  # its memory is another's by now
        got = reader.read(told)
        assert got["merged"].tolist() == [version] * 4
        assert got["plain"].data_ptr() == own["plain"].data_ptr()
    assert len(handles.flats) == 2


class OnGpu(Tensor):
    """A tensor of a CPU that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def test_readers_that_do_not_open_the_trainers_memory_get_a_copy_on_the_host() -> None:
    tensors = {"a": torch.arange(6.0).as_subclass(OnGpu)}
    memory = SharedWeights(anonymous_file(), on_host=True)
    told = memory.write(Publication(version=1, tensors=tensors))
    tensors["a"] += 1.0  # the next step has begun
    assert memory.read(told).tensors["a"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    memory.close()
