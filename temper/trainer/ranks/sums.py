"""Trainer ranks that train a share of every batch each.

Owns: adding up gradients and metrics over ranks. Refuses: averaging; token weights hold the whole batch's denominator,
so a sum is the gradient. In a single process everything here is the identity. Waits end with the group's own timeout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from temper.objectives import MetricSums, Tokens
from temper.trainer.ranks.context import is_counted

BUCKET_BYTES = 64 << 20
"""Gradients sent together: hundreds of small tensors one by one would wait for the network hundreds of times."""

Key = TypeVar("Key")
Value = TypeVar("Value")

_FIELDS = ("totals", "sums", "counts", "maxima", "minima", "histograms", "loads")


def rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def sum_over_ranks(tensors: Iterable[Tensor]) -> None:
    """In place. Every rank calls it with tensors of the same shapes in the same order, also one with an empty share."""
    if rank_and_world()[1] == 1:
        return
    for bucket in _buckets(tensors):
        together = torch.cat([tensor.flatten() for tensor in bucket])
        dist.all_reduce(together)
        for tensor, part in zip(bucket, torch.split(together, [t.numel() for t in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


def norm_over_ranks(own: Tensor) -> Tensor:
    """Of what all ranks hold together, from the norm of what each holds."""
    square = own.double().square()
    dist.all_reduce(square)
    return square.sqrt().to(own.dtype)


def merge_over_ranks(metrics: MetricSums) -> MetricSums:
    """Merged in rank order, so that every rank gets the same numbers."""
    world = rank_and_world()[1]
    if world == 1:
        return metrics
    metrics = metrics if is_counted() else MetricSums()
    plain = {field: {name: value.tolist() for name, value in getattr(metrics, field).items()} for field in _FIELDS}
    gathered: list[dict[str, dict[str, float | list[float]]]] = [{} for _ in range(world)]
    dist.all_gather_object(gathered, plain)
    merged = MetricSums()
    for part in gathered:
        merged = merged.merge(MetricSums(**{field: _tensors(part[field]) for field in _FIELDS}))
    return merged


def gather_over_ranks(own: Mapping[int, Tokens]) -> dict[int, Tokens]:
    """The numbered parts of all ranks; on the CPU when there are several. A rank without parts takes part with none."""
    is_alone = rank_and_world()[1] == 1
    return tell_all_ranks({number: tokens if is_alone else tokens.cpu() for number, tokens in own.items()})


def tell_all_ranks(own: Mapping[Key, Value]) -> dict[Key, Value]:
    """What all ranks have, on every one. Keys of ranks differ, or have equal values."""
    world = rank_and_world()[1]
    if world == 1:
        return dict(own)
    gathered: list[dict[Key, Value]] = [{} for _ in range(world)]
    dist.all_gather_object(gathered, dict(own))
    return {key: value for part in gathered for key, value in part.items()}


def gather_to_first(own: Mapping[Key, Value]) -> dict[Key, Value]:
    """What all ranks have, on rank 0; its own part elsewhere. Keys of ranks differ."""
    rank, world = rank_and_world()
    if world == 1:
        return dict(own)
    gathered: list[Mapping[Key, Value]] | None = [{} for _ in range(world)] if rank == 0 else None
    dist.gather_object(dict(own), gathered, dst=0)
    return {key: value for part in gathered for key, value in part.items()} if gathered else dict(own)


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, up to BUCKET_BYTES together, or one larger tensor alone."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.nbytes > BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def _tensors(values: dict[str, float | list[float]]) -> dict[str, Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
