"""A block is free exactly when nobody refers to it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from temper.engine.local.blocks import SCRATCH_BLOCK, BlockPool


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release", "keep"]), st.integers(0, 9)), max_size=60))
def test_blocks_are_neither_leaked_nor_handed_out_twice(actions: list[tuple[str, int]]) -> None:
    pool = BlockPool(12)
    held: list[np.ndarray] = []
    for action, number in actions:
        if action == "take" and number <= pool.num_free:
            taken = pool.take(number)
            assert not set(taken.tolist()) & {block for blocks in held for block in blocks.tolist()}
            held.append(taken)
        elif action == "share" and held:
            pool.share(held[number % len(held)])
            held.append(held[number % len(held)])
        elif action == "release" and held:
            pool.release(held.pop(number % len(held)))
        elif action == "keep" and held:
            for block in held[number % len(held)].tolist():
                pool.keep(block)
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


def test_a_free_block_that_nobody_kept_cannot_be_shared() -> None:
    pool = BlockPool(4)
    blocks = pool.take(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="in use or kept"):
        pool.share(blocks)


def test_kept_blocks_are_evicted_last_and_least_recently_used_first() -> None:
    pool, evicted = BlockPool(7), []
    pool.on_evict = evicted.append
    first, second, plain = pool.take(2), pool.take(2), pool.take(2)
    for block in (*first.tolist(), *second.tolist()):
        pool.keep(block)
    for blocks in (first, second, plain):
        pool.release(blocks)
    assert pool.num_free == 6
    pool.share(first)  # used again: now the second pair is the older one
    pool.release(first)
    pool.take(2)
    assert evicted == []
    pool.take(3)
    assert evicted == [*second.tolist()[::-1], first.tolist()[1]], "of one text, the end goes first"
