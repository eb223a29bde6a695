"""A block is free exactly when nobody refers to it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from temper.engine.local.blocks import SCRATCH_BLOCK, BlockPool


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 9)), max_size=60))
def test_blocks_are_neither_leaked_nor_handed_out_twice(actions: list[tuple[str, int]]) -> None:
    pool = BlockPool(12)
    held: list[np.ndarray] = []
    for action, number in actions:
        if action == "take" and number <= pool.num_free:
            held.append(pool.take(number))
        elif action == "share" and held:
            pool.share(held[number % len(held)])
            held.append(held[number % len(held)])
        elif action == "release" and held:
            pool.release(held.pop(number % len(held)))
        in_use = set(np.concatenate([*held, np.empty(0, dtype=np.int64)]).tolist())
        assert pool.num_free == 11 - len(in_use)
        assert SCRATCH_BLOCK not in in_use
    for blocks in held:
        pool.release(blocks)
    assert sorted(pool.take(11).tolist()) == list(range(1, 12))


def test_releasing_more_often_than_taken_is_caught() -> None:
    pool = BlockPool(4)
    blocks = pool.take(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(blocks)
