"""Parameters laid end to end on paper and cut into buckets that are updated one after the other.

Owns: which values of which parameter lie where. Refuses: tensors.
A bucket bounds what an update needs beside the state itself: a model may be large, what is computed at once is not.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from temper.trainer.adamw.moments import BLOCK

BUCKET_VALUES = 1 << 25
"""Enough to launch seldom, few enough for temporary tensors of 128 MiB. A power of two, as the allocator of pinned
memory rounds up to one."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Values start ... stop of a flat parameter, which begin at `place` of their bucket."""

    name: str
    start: int
    stop: int
    place: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Bucket:
    number: int
    first: int
    """Place of its first value when all buckets are laid end to end. Does not depend on the size of buckets."""
    size: int
    """Values, a multiple of BLOCK; gaps behind parameters that are no multiple are counted."""
    slices: tuple[Slice, ...]


def make_buckets(sizes: Mapping[str, int], kinds: Mapping[str, Hashable], bucket_values: int) -> list[Bucket]:
    """Buckets whose parameters are of one kind each, in order; all but the last of a kind are full.

    Parameters and buckets begin at multiples of BLOCK, so no block holds two parameters or is cut in two.
    """
    assert bucket_values % BLOCK == 0, f"buckets hold whole blocks of {BLOCK}"
    buckets: list[Bucket] = []
    first = 0
    for kind in dict.fromkeys(kinds.values()):
        names = [name for name in sizes if kinds[name] == kind]
        total = sum(_padded(sizes[name]) for name in names)
        pieces = list(_pieces(names, sizes, bucket_values))
        for start in range(0, total, bucket_values):
            inside = tuple(piece for bucket, piece in pieces if bucket == start // bucket_values)
            buckets.append(Bucket(len(buckets), first + start, min(bucket_values, total - start), inside))
        first += total
    return buckets


def _pieces(names: Sequence[str], sizes: Mapping[str, int], bucket_values: int) -> Iterator[tuple[int, Slice]]:
    """(bucket of the kind, slice) of the parameters, cut where buckets end."""
    place = 0
    for name in names:
        start = 0
        while start < sizes[name]:
            bucket, inside = divmod(place + start, bucket_values)
            stop = min(sizes[name], start + bucket_values - inside)
            yield bucket, Slice(name, start, stop, inside)
            start = stop
        place += _padded(sizes[name])


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
