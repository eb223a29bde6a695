"""Weights on their way into another process of this machine.

Owns: the memory that both have mapped, and where each tensor lies in it. Refuses: deciding whether they fit; the engine
does, before it takes the first of them. On a GPU: device_weights.py.
The memory has no name in any file system: it is gone with the last process that has it open, however that ends.
"""

from __future__ import annotations

import asyncio
import math
import mmap
import os
import tempfile
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from temper.engine.process.wire import Frame
from temper.errors import BackendError
from temper.types import Publication

if TYPE_CHECKING:  # a process that only forwards frames needs no torch
    import torch

    from temper.engine.process.device_weights import DeviceReader, DeviceWriter

SendPiece = Callable[[Frame], Awaitable[None]]
"""Sends a part of the weights to the other side, and waits until there is room for the next."""
ALIGNMENT = 64
"""Of a tensor in the memory, in bytes: what vector instructions like."""


def anonymous_file() -> int:
    """Descriptor of a file without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("temper-weights")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class SharedWeights:
    """One publication at a time, for any number of readers. The next may be written once all of them have acknowledged
    the last one."""

    def __init__(self, descriptor: int, *, on_host: bool = False) -> None:
        """on_host: tensors of a GPU are written here, too, for readers that do not open the trainer's own memory."""
        self.descriptor, self._on_host = descriptor, on_host
        self._map: mmap.mmap | None = None
        self._writer: DeviceWriter | None = None
        self._reader: DeviceReader | None = None
        self._writing = threading.Lock()
        self._written: tuple[Publication, dict[str, Any]] | None = None

    async def hand_over(self, publication: Publication, send: SendPiece) -> dict[str, Any]:
        """Nothing is sent: the other side has the same memory."""
        return await asyncio.to_thread(self.write, publication)

    def put(self, start: int, data: Any, size: int) -> None:
        """Bytes of weights that came over a socket, where they lie among `size`."""
        if not 0 <= start <= start + len(data) <= size:
            raise BackendError("weights outside of what was announced: the stream is out of step")
        self._open_map(size)[start : start + len(data)] = memoryview(data).cast("B")

    def write(self, publication: Publication) -> dict[str, Any]:
        """What the other side needs to find the tensors, in their order. For a reader that comes later it is told again
        and not written again: the trainer's own tensors may be on their way to the next version."""
        with self._writing:
            if self._written is None or self._written[0] is not publication:
                self._written = publication, self._write(publication)
            return self._written[1]

    def _write(self, publication: Publication) -> dict[str, Any]:
        import torch

        like = publication.alike or publication.tensors
        if not self._on_host and any(tensor.is_cuda for tensor in like.values()):
            return self._write_on_device(publication)
        places, size = places_of(like)
        views = self._views(places, size)
        with torch.no_grad():
            for name, view in views.items():
                tensor = publication.tensors[name]
                if (tensor.shape, tensor.dtype) != (view.shape, view.dtype):
                    raise BackendError(f"publication {publication.version}: {name} is not what was announced")
                view.copy_(tensor)
        return {"version": publication.version, "size": size, "tensors": places}

    def read(self, told: Mapping[str, Any]) -> Publication:
        """What was written, without a copy."""
        if "storages" in told:
            return Publication(version=told["version"], tensors=self._read_on_device(told))
        if (held := os.fstat(self.descriptor).st_size) < told["size"]:
            raise BackendError(f"publication {told['version']} has {told['size']} bytes, and {held} arrived")
        return Publication(version=told["version"], tensors=self._views(told["tensors"], told["size"]))

    def forget(self) -> None:
        """The trainer whose weights these were is gone. Writer and readers all forget before the next publication: what
        is on a GPU has numbers, which then begin anew."""
        self._writer = self._reader = self._written = None

    def close(self) -> None:
        """The map goes with the last tensor over it."""
        self._map = None
        os.close(self.descriptor)

    def _write_on_device(self, publication: Publication) -> dict[str, Any]:
        from temper.engine.process.device_weights import DeviceWriter

        self._writer = self._writer or DeviceWriter()
        return self._writer.write(publication)

    def _read_on_device(self, told: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        from temper.engine.process.device_weights import DeviceReader

        self._reader = self._reader or DeviceReader()
        return self._reader.read(told)

    def _open_map(self, size: int) -> mmap.mmap:
        if self._map is None or len(self._map) < size:
            if os.fstat(self.descriptor).st_size < size:
                os.ftruncate(self.descriptor, size)
            self._map = mmap.mmap(self.descriptor, size)
        return self._map

    def _views(self, places: list[list[Any]], size: int) -> dict[str, torch.Tensor]:
        import torch

        mapped = self._open_map(size)
        views = {}
        for name, shape, kind, start in places:
            dtype, count = getattr(torch, kind), math.prod(shape)
            if not isinstance(dtype, torch.dtype) or start + count * dtype.itemsize > size:
                raise BackendError(f"{name} lies outside of the weights that were sent")
            empty = torch.empty(shape, dtype=dtype)
            views[name] = (
                torch.frombuffer(mapped, dtype=dtype, count=count, offset=start).view(shape) if count else empty
            )
        return views


def places_of(tensors: Mapping[str, torch.Tensor]) -> tuple[list[list[Any]], int]:
    """(name, shape, dtype, first byte) of each, and the bytes of all."""
    places: list[list[Any]] = []
    start = 0
    for name, tensor in tensors.items():
        places.append([name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."), start])
        start += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    return places, max(start, 1)
