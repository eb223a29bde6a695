"""Full KV blocks found again by the token ids they stand for: the next turn of a conversation computes what is new.

Owns: which block holds which ids after which ids, under which weights. Refuses: partly filled blocks, and guessing:
keys hold the ids themselves, so two texts can never be taken for each other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from temper.engine.local.blocks import BlockPool, Blocks

Key = tuple[int, bytes]
"""What comes before (the number of the entry, or one per generation of weights) and the ids of the block."""


class PrefixCache:
    """A tree of blocks, one dict for all edges. It holds no references: the pool decides when a block is evicted."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._entries: dict[Key, tuple[int, int]] = {}
        """Number of the entry and block. No number is used twice, so what follows an evicted entry is lost."""
        self._keys: dict[int, Key] = {}
        self._num_entries = 0
        pool.on_evict = self._drop

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, tokens: NDArray[np.integer], weights: int) -> Blocks:
        """Blocks of the longest known start of these tokens, computed under these weights. The caller shares them."""
        found: list[int] = []
        before = _root(weights)
        for ids in self._cut(tokens):
            entry = self._entries.get((before, ids))
            if entry is None:
                break
            before, block = entry
            found.append(block)
        return np.asarray(found, dtype=np.int64)

    def register(self, tokens: NDArray[np.integer], blocks: Blocks, weights: int) -> None:
        """The full blocks of these computed tokens can be found from now on. `blocks` are in use."""
        before = _root(weights)
        for ids, block in zip(self._cut(tokens), blocks.tolist(), strict=False):
            entry = self._entries.get((before, ids))
            before = self._add((before, ids), block) if entry is None else entry[0]

    def clear(self) -> None:
        for block in list(self._keys):
            self._drop(block)
            self._pool.forget(block)

    def _add(self, key: Key, block: int) -> int:
        if (old := self._keys.get(block)) is not None:  # what came before it was evicted and is known again elsewhere
            del self._entries[old]
        self._num_entries += 1
        self._entries[key] = (self._num_entries, block)
        self._keys[block] = key
        self._pool.keep(block)
        return self._num_entries

    def _drop(self, block: int) -> None:
        del self._entries[self._keys.pop(block)]

    def _cut(self, tokens: NDArray[np.integer]) -> list[bytes]:
        """The ids of each full block."""
        data, size = tokens.tobytes(), self._block_size * tokens.itemsize
        return [data[start : start + size] for start in range(0, len(data) - size + 1, size)]


def _root(weights: int) -> int:
    """Number of the root for these weights. Negative, so that no entry has it."""
    return -1 - weights
