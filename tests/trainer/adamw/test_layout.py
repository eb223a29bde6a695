"""Every value of every parameter lies in one bucket, and where does not depend on the size of buckets."""

from __future__ import annotations

import pytest

from temper.trainer.adamw.layout import Bucket, make_buckets

SIZES = {"a": 1000, "b": 1, "c": 256, "d": 5000, "e": 300}
KINDS = {"a": "matrix", "b": "vector", "c": "matrix", "d": "matrix", "e": "vector"}


def places(buckets: list[Bucket]) -> dict[tuple[str, int], int]:
    """Where each value lies when all buckets are laid end to end."""
    found = {}
    for bucket in buckets:
        for piece in bucket.slices:
            for offset in range(piece.size):
                value = (piece.name, piece.start + offset)
                assert value not in found
                found[value] = bucket.first + piece.place + offset
    return found


@pytest.mark.parametrize("bucket_values", [256, 512, 4096, 1 << 25])
def test_buckets_hold_every_value_once_in_blocks_of_one_parameter(bucket_values: int) -> None:
    buckets = make_buckets(SIZES, KINDS, bucket_values)
    found = places(buckets)
    assert len(found) == sum(SIZES.values())
    assert found == places(make_buckets(SIZES, KINDS, 1 << 20))
    blocks = {}
    for (name, _), place in found.items():
        assert blocks.setdefault(place // 256, name) == name
    for number, bucket in enumerate(buckets):
        assert bucket.number == number
        assert bucket.size % 256 == 0
        assert len({KINDS[piece.name] for piece in bucket.slices}) == 1
        assert all(piece.place + piece.size <= bucket.size for piece in bucket.slices)
        assert all(piece.start % 256 == 0 for piece in bucket.slices)
    full = [bucket.size for bucket in buckets if bucket.size == bucket_values]
    assert len(buckets) - len(full) <= 2, "only the last bucket of a kind is not full"
