"""Reference-counted KV blocks. A block is free exactly when nobody refers to it.

Owns: which blocks are free and how many sequences share each. Refuses: knowing what the blocks hold.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.int64]

SCRATCH_BLOCK = 0
"""Never handed out: padded rows of a fixed-size decode step write here."""


class BlockPool:
    """Hands out block numbers, many at a time, without Python work per block."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "one scratch block and at least one usable block"
        self.num_blocks = num_blocks
        self._stack: Blocks = np.arange(num_blocks - 1, SCRATCH_BLOCK, -1, dtype=np.int64)
        self._top = len(self._stack)
        self._references = np.zeros(num_blocks, dtype=np.int64)

    @property
    def num_free(self) -> int:
        return self._top

    @property
    def use(self) -> float:
        """Share of usable blocks in use."""
        return 1.0 - self._top / len(self._stack)

    def take(self, count: int) -> Blocks:
        """`count` fresh blocks with one reference each. The caller has checked num_free."""
        assert count <= self._top, f"{count} blocks asked, {self._top} free"
        self._top -= count
        taken = self._stack[self._top : self._top + count].copy()
        self._references[taken] = 1
        return taken

    def share(self, blocks: Blocks) -> None:
        """One more reference to each of these distinct blocks."""
        assert (self._references[blocks] > 0).all(), "only blocks in use can be shared"
        self._references[blocks] += 1

    def release(self, blocks: Blocks) -> None:
        """One reference less to each of these distinct blocks; those at zero are free again."""
        self._references[blocks] -= 1
        assert (self._references[blocks] >= 0).all(), "a block was released more often than taken"
        freed = blocks[self._references[blocks] == 0]
        self._stack[self._top : self._top + len(freed)] = freed
        self._top += len(freed)
