"""Weights on a GPU, read by another process where they are: CUDA IPC.

Owns: which storages are shared, once and for good, and where tensors lie in them. Refuses: copies where the trainer's
own memory can be read; only weights made for a publication (merged ones) are put into memory of their own first.
Sharing anew for each publication would leave a counter behind for every tensor: torch keeps one as long as a storage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from temper.types import Publication

BYTES_AT = (7, 11, 13)
"""Which arguments of torch's rebuild_cuda_tensor are bytes: handles of the storage, of its counter and of an event."""


def share_storage(flat: Tensor) -> list[Any]:
    """Handles by which another process opens a storage, given as its bytes; as JSON has them."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(flat)  # type: ignore[no-untyped-call]
    told = list(arguments)
    for place in BYTES_AT:
        told[place] = None if told[place] is None else bytes(told[place]).hex()
    told[0] = told[4] = told[5] = None  # a tensor of bytes over a typed storage
    told[1], told[2] = list(flat.shape), list(flat.stride())
    return told


def open_storage(told: list[Any]) -> Tensor:
    """What share_storage() told of, in the process that it was told to."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments = list(told)
    for place in BYTES_AT:
        arguments[place] = None if told[place] is None else bytes.fromhex(told[place])
    arguments[0], arguments[4], arguments[5] = torch.Tensor, torch.storage.TypedStorage, torch.uint8
    arguments[1], arguments[2] = tuple(told[1]), tuple(told[2])
    flat: Tensor = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
    return flat


class DeviceWriter:
    """The trainer's side."""

    def __init__(self, share: Callable[[Tensor], list[Any]] = share_storage) -> None:
        self._share = share
        self._shared: dict[int, tuple[int, Tensor]] = {}
        """By address: number and bytes of each storage. Held, so that no other can come to the same address."""
        self._told: list[list[Any]] = []
        """Number and handles of each. All are told each time: a reader may be a new one."""
        self._made: dict[str, Tensor] = {}
        """Where weights that are made for each publication are put."""

    def write(self, publication: Publication) -> dict[str, Any]:
        """What the other side needs to find the tensors of this publication."""
        views = list[list[Any]]()
        for name in publication.tensors:
            tensor = self._lasting(name, publication)
            base = tensor.untyped_storage()
            if base.data_ptr() not in self._shared:
                flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(base)  # type: ignore[call-overload]
                self._shared[base.data_ptr()] = len(self._shared), flat
                self._told.append([self._shared[base.data_ptr()][0], self._share(flat)])
            number, _ = self._shared[base.data_ptr()]
            dtype = str(tensor.dtype).removeprefix("torch.")
            views.append([name, number, dtype, tensor.storage_offset(), list(tensor.shape), list(tensor.stride())])
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the update that made them must be over before others read
        return {"version": publication.version, "storages": list(self._told), "views": views}

    def _lasting(self, name: str, publication: Publication) -> Tensor:
        tensor = publication.tensors[name].detach()
        if publication.alike is None or publication.alike[name].data_ptr() == tensor.data_ptr():
            return tensor  # the model's own
        if name not in self._made:
            self._made[name] = torch.empty_like(tensor)
        return self._made[name].copy_(tensor)


class DeviceReader:
    """The sampler's side. Storages stay open: the trainer's weights stay where they are."""

    def __init__(self, opener: Callable[[list[Any]], Tensor] = open_storage) -> None:
        self._open = opener
        self._storages: dict[int, Tensor] = {}

    def read(self, told: Mapping[str, Any]) -> dict[str, Tensor]:
        for number, handles in told["storages"]:
            if number not in self._storages:
                self._storages[number] = self._open(handles)
        tensors = {}
        for name, number, kind, offset, shape, stride in told["views"]:
            flat = self._storages[number]
            empty = torch.empty(0, dtype=getattr(torch, kind), device=flat.device)
            tensors[name] = empty.set_(flat.untyped_storage(), offset, tuple(shape), tuple(stride))
        return tensors
