"""Reference-counted KV blocks. A block is free exactly when nobody refers to it.

Owns: which blocks are free, how many sequences share each, which free ones still hold something worth finding again.
Refuses: knowing what the blocks hold (prefix.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.int64]

SCRATCH_BLOCK = 0
"""Never handed out: padded rows and tokens beyond a row's limit write here."""


class BlockPool:
    """Hands out block numbers, many at a time. Python works per block only for blocks that are kept."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "one scratch block and at least one usable block"
        self.num_blocks = num_blocks
        self.on_evict: Callable[[int], None] = lambda block: None
        """Told of every kept block that is handed out for something else."""
        self._stack: Blocks = np.arange(num_blocks - 1, SCRATCH_BLOCK, -1, dtype=np.int64)
        self._top = len(self._stack)
        self._references = np.zeros(num_blocks, dtype=np.int64)
        self._is_kept = np.zeros(num_blocks, dtype=bool)
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Kept blocks that nobody refers to, least recently used first."""

    @property
    def num_free(self) -> int:
        return self._top + len(self._idle)

    @property
    def use(self) -> float:
        """Share of usable blocks in use."""
        return 1.0 - self.num_free / len(self._stack)

    def num_idle(self, blocks: Blocks) -> int:
        """How many of these nobody refers to: sharing them takes them from the free ones."""
        return int((self._references[blocks] == 0).sum())

    def take(self, count: int) -> Blocks:
        """`count` fresh blocks with one reference each. The caller has checked num_free."""
        assert count <= self.num_free, f"{count} blocks asked, {self.num_free} free"
        if count > self._top:
            evicted = [self._idle.popitem(last=False)[0] for _ in range(count - self._top)]
            self._is_kept[evicted] = False
            self._push(np.asarray(evicted))
            for block in evicted:
                self.on_evict(block)
        self._top -= count
        taken = self._stack[self._top : self._top + count].copy()
        self._references[taken] = 1
        return taken

    def share(self, blocks: Blocks) -> None:
        """One more reference to each of these distinct blocks, in use or kept."""
        for block in blocks[self._references[blocks] == 0].tolist():
            assert block in self._idle, "only blocks in use or kept can be shared"
            del self._idle[block]
        self._references[blocks] += 1

    def release(self, blocks: Blocks) -> None:
        """One reference less to each of these distinct blocks; those at zero are free again."""
        self._references[blocks] -= 1
        assert (self._references[blocks] >= 0).all(), "a block was released more often than taken"
        freed = blocks[self._references[blocks] == 0]
        # Last block first: the start of a text is found by more requests than its end, so it is evicted later.
        self._idle.update(dict.fromkeys(freed[self._is_kept[freed]][::-1].tolist()))
        self._push(freed[~self._is_kept[freed]])

    def keep(self, block: int) -> None:
        """When nobody refers to this block any more, its contents stay until room is needed."""
        assert self._references[block] > 0, "only a block in use can be kept"
        self._is_kept[block] = True

    def forget(self, block: int) -> None:
        """The contents of a kept block are no longer worth anything."""
        self._is_kept[block] = False
        if block in self._idle:
            del self._idle[block]
            self._push(np.asarray([block]))

    def _push(self, blocks: Blocks) -> None:
        self._stack[self._top : self._top + len(blocks)] = blocks
        self._top += len(blocks)
