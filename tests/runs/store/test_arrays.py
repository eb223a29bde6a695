"""Token arrays on disk: the same bits back, in fewer bytes."""

from __future__ import annotations

import numpy as np
import pytest

from temper.runs.store.arrays import ARRAY_TYPES, PLANES, RAW, pack_array, unpack_array


@pytest.mark.parametrize("name", ARRAY_TYPES)
@pytest.mark.parametrize("size", [0, 1, 7, 5000])
def test_every_array_comes_back_to_the_bit(name: str, size: int) -> None:
    bits = np.random.default_rng(size).integers(0, 256, size * np.dtype(ARRAY_TYPES[name]).itemsize, dtype=np.uint8)
    array = bits.view(ARRAY_TYPES[name])  # any bits at all, not-a-number among them
    found = unpack_array(pack_array(array, name), name, PLANES)
    assert found.dtype == array.dtype
    assert found.tobytes() == array.tobytes()
    assert unpack_array(array.tobytes(), name, RAW).tobytes() == array.tobytes()


def test_what_repeats_takes_next_to_nothing_and_ids_less_than_half() -> None:
    draw = np.random.default_rng(0)
    assert len(pack_array(np.full(8192, 3), "versions")) < 100
    assert len(pack_array(np.full(8192, 0.7071), "advantages")) < 100
    assert len(pack_array(draw.zipf(1.3, 8192) % 150_000, "token_ids")) < 0.5 * 4 * 8192


def test_an_unknown_way_of_packing_is_not_guessed_at() -> None:
    with pytest.raises(AssertionError, match="raw or planes"):
        unpack_array(b"", "versions", "zstd")
