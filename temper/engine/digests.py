"""Sums over what tensors hold, by which a driver finds out whether samplers elsewhere hold what it published.

Owns: the sums and their comparison. Refuses: hashes that withstand malice (manifest.py has them): these find what went
wrong by itself, where the tensors are, at the speed at which their memory is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from temper.models.float8.arithmetic import quantize_rows
from temper.models.float8.layers import float8_layers
from temper.models.save import saved_tensors
from temper.types import Publication

WIDTH = 1024
"""Words of eight bytes in a row of the table that a tensor's bytes are laid out as."""
COLUMNS_FACTOR = 0x1E3779B97F4A7C14
"""Even: together with odd weights of places, no single word can change unseen."""


class Digests:
    """Of named tensors. The device is looked at once for all of them."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor, *more: Tensor) -> None:
        """more: held with it, such as scales."""
        self._said[name] = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        sums = [sum_of(each) * (2 * place + 1) for place, each in enumerate((tensor, *more))]
        self._sums[name] = torch.stack(sums).sum()

    def __contains__(self, name: str) -> bool:
        return name in self._sums

    def read(self) -> dict[str, str]:
        by_device: dict[torch.device, list[str]] = {}
        for name, total in self._sums.items():
            by_device.setdefault(total.device, []).append(name)
        read = dict[str, str]()
        for names in by_device.values():
            totals = torch.stack([self._sums[name] for name in names]).tolist()
            read |= {
                name: f"{self._said[name]} {total % 2**64:016x}" for name, total in zip(names, totals, strict=True)
            }
        return read


class DigestedTensors(Mapping[str, Tensor]):
    """Tensors of a publication, each added up when it is first asked for: what is published, and not what the trainer
    makes of it later."""

    def __init__(self, tensors: Mapping[str, Tensor], quantized: Collection[str]) -> None:
        """quantized: those of which samplers hold float8 and scales."""
        self._tensors, self._quantized = tensors, quantized
        self.digests = Digests()

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if name in self.digests:
            return tensor
        if name in self._quantized:
            rows, scale = quantize_rows(tensor.detach())
            self.digests.add(name, rows, scale[:, 0])
        else:
            self.digests.add(name, tensor)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def digested(publication: Publication, quantized: Collection[str] = ()) -> tuple[Publication, Digests]:
    """The publication, and what is known of its tensors when it was handed over."""
    tensors = DigestedTensors(publication.tensors, quantized)
    alike = publication.alike or publication.tensors
    return Publication(version=publication.version, tensors=tensors, alike=alike), tensors.digests


def held_digests(model: nn.Module) -> dict[str, str]:
    """Of what a model draws with, under the names of a publication."""
    quantized, digests = float8_layers(model), Digests()
    for name, tensor in saved_tensors(model).items():
        if name in quantized:
            digests.add(name, quantized[name].weight, quantized[name].scale)
        else:
            digests.add(name, tensor)
    return digests.read()


def differing(published: Mapping[str, str], held: Mapping[str, str]) -> list[str]:
    """Names of tensors that one of both lacks, or holds with other numbers."""
    return sorted(name for name in {*published, *held} if published.get(name) != held.get(name))


@torch.no_grad()
def sum_of(tensor: Tensor) -> Tensor:
    """Over all bytes and where they stand, modulo 2^64: the same on every device and in every order of additions."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()  # words must begin where words may
    whole = len(flat) // (8 * WIDTH) * (8 * WIDTH)
    table = flat[:whole].view(torch.int64).view(-1, WIDTH)
    last = flat.new_zeros(8 * WIDTH)
    last[: len(flat) - whole] = flat[whole:]
    rest = last.view(torch.int64)
    columns, rows = table.sum(0) + rest, torch.cat([table.sum(1), rest.sum().view(1)])
    return (_weights(rows) * rows).sum() + COLUMNS_FACTOR * (_weights(columns) * columns).sum()


def _weights(sums: Tensor) -> Tensor:
    return torch.arange(1, 2 * len(sums), 2, device=sums.device)
