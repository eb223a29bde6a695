"""A known prefix is found by its ids and the weights that computed it, and by nothing else."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from temper.engine.local.blocks import BlockPool
from temper.engine.local.prefix import PrefixCache


def ids(*tokens: int) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int64)


def test_the_longest_known_prefix_of_full_blocks_is_found() -> None:
    pool = BlockPool(9)
    cache = PrefixCache(pool, 2)
    blocks = pool.take(3)
    cache.register(ids(1, 2, 3, 4, 5), blocks, 0)
    assert cache.find(ids(1, 2, 3, 4, 5, 6), 0).tolist() == blocks[:2].tolist(), "the third block is not full"
    assert cache.find(ids(1, 2, 3), 0).tolist() == blocks[:1].tolist()
    assert cache.find(ids(1, 2, 9, 4), 0).tolist() == blocks[:1].tolist()
    assert cache.find(ids(3, 4), 0).tolist() == [], "the same ids after other ids are another text"
    assert cache.find(ids(1, 2, 3, 4), 1).tolist() == [], "other weights"


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=9), st.integers(0, 1)), max_size=12))
def test_what_is_found_is_what_was_registered_whatever_is_evicted(texts: list[tuple[list[int], int]]) -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool, 2)
    contents: dict[int, tuple[list[int], int]] = {}
    for tokens, weights in texts:
        known = cache.find(ids(*tokens), weights)
        for place, block in enumerate(known.tolist()):
            assert contents[block] == (tokens[: 2 * place + 2], weights)
        pool.share(known)
        fresh = pool.take(-(-len(tokens) // 2) - len(known))
        blocks = np.concatenate((known, fresh))
        for place, block in enumerate(fresh.tolist(), start=len(known)):
            contents[block] = (tokens[: 2 * place + 2], weights)
        cache.register(ids(*tokens), blocks, weights)
        pool.release(blocks)
        assert pool.num_free == 7
        assert len(cache) <= 7, "no entry outlives its block"
    cache.clear()
    assert len(cache) == 0
    assert len(cache._keys) == len(pool._idle) == 0


def test_what_follows_an_evicted_block_is_not_found_under_a_block_of_the_same_place() -> None:
    pool = BlockPool(4)
    cache = PrefixCache(pool, 1)
    blocks = pool.take(2)
    cache.register(ids(1, 2), blocks, 0)
    pool.release(blocks[:1])
    fresh = pool.take(2)  # evicts the first block, whose successor is still in use
    cache.register(ids(7), fresh[-1:], 0)
    assert cache.find(ids(7), 0).tolist() == fresh[-1:].tolist()
    assert cache.find(ids(7, 2), 0).tolist() == fresh[-1:].tolist(), "2 came after 1, not after 7"
    assert cache.find(ids(1, 2), 0).tolist() == []
    cache.register(ids(1, 2), np.concatenate((fresh[:1], blocks[1:])), 0)
    assert cache.find(ids(1, 2), 0).tolist() == [fresh[0], blocks[1]], "known again from its new start"
