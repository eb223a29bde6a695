"""State of all running sequences as arrays, one row each, so that a decode step does no Python work per sequence.

Owns: tokens, block tables, counters of what is running. Refuses: deciding what runs (scheduler.py).
Shapes: _R rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from temper.engine.local.blocks import SCRATCH_BLOCK, Blocks
from temper.engine.local.sequence import Sequence

Rows_R = NDArray[np.int64]


class Rows:
    """`max_running` rows. Columns grow when a longer sequence arrives."""

    def __init__(self, max_running: int, block_size: int) -> None:
        self.block_size = block_size
        self.sequences: list[Sequence | None] = [None] * max_running
        self.is_active = np.zeros(max_running, dtype=bool)
        self.length = np.zeros(max_running, dtype=np.int64)
        self.num_computed = np.zeros(max_running, dtype=np.int64)
        self.num_prompt = np.zeros(max_running, dtype=np.int64)
        self.limit = np.zeros(max_running, dtype=np.int64)
        self.num_blocks = np.zeros(max_running, dtype=np.int64)
        self.arrival = np.zeros(max_running, dtype=np.int64)
        self.temperature = np.zeros(max_running, dtype=np.float32)
        self.random_key = np.zeros(max_running, dtype=np.uint64)
        self.stop_set = np.zeros(max_running, dtype=np.int64)
        self.tokens = np.zeros((max_running, 0), dtype=np.int64)
        self.logprobs = np.zeros((max_running, 0), dtype=np.float32)
        self.versions = np.zeros((max_running, 0), dtype=np.int64)
        self.blocks = np.full((max_running, 0), SCRATCH_BLOCK, dtype=np.int64)
        self._num_top: Rows_R | None = None
        """Most likely tokens each row wants. None: nobody ever asked, and no step pays for the question."""
        self._arrivals = 0
        self._stop_sets: dict[tuple[int, ...], int] = {}
        self._stop_arrays: list[NDArray[np.int64]] = []

    @property
    def num_free(self) -> int:
        return len(self.is_active) - int(self.is_active.sum())

    def reserve(self, length: int) -> None:
        """Makes room for sequences of this many tokens."""
        if length <= self.tokens.shape[1]:
            return
        width = max(length, 2 * self.tokens.shape[1])
        for name, fill in (("tokens", 0), ("logprobs", 0), ("versions", -1)):
            setattr(self, name, _widened(getattr(self, name), width, fill))
        self.blocks = _widened(self.blocks, -(-width // self.block_size), SCRATCH_BLOCK)

    def enter(self, sequence: Sequence, limit: int) -> int:
        """Moves a sequence into a free row and returns the row."""
        row = int(np.argmin(self.is_active))
        assert not self.is_active[row], "no free row"
        self.reserve(limit)
        length, prompt = len(sequence.token_ids), sequence.num_prompt
        self.sequences[row] = sequence
        self.is_active[row] = True
        self.length[row], self.num_computed[row] = length, sequence.num_computed
        self.num_prompt[row], self.limit[row] = prompt, limit
        self.temperature[row] = sequence.request.params.temperature
        self.random_key[row] = sequence.random_key
        self.stop_set[row] = self._stop_index(sequence.request.params.stop_ids)
        self._set_num_top(row, sequence.request.params.top_logprobs)
        self.arrival[row] = self._arrivals
        self._arrivals += 1
        self.tokens[row, :length] = sequence.token_ids
        self.logprobs[row, prompt:length] = sequence.logprobs
        self.versions[row, prompt:length] = sequence.versions
        self.blocks[row] = SCRATCH_BLOCK
        self.num_blocks[row] = 0
        self.add_blocks(row, sequence.blocks)
        return row

    def leave(self, row: int) -> tuple[Sequence, Blocks]:
        """Takes a sequence out, its tokens copied back; returns it and the block references it held."""
        sequence = self.sequences[row]
        assert sequence is not None
        prompt, length = int(self.num_prompt[row]), int(self.length[row])
        sequence.token_ids = self.tokens[row, :length].tolist()
        sequence.logprobs = self.logprobs[row, prompt:length].tolist()
        sequence.versions = self.versions[row, prompt:length].tolist()
        sequence.num_computed = 0
        sequence.blocks = np.empty(0, dtype=np.int64)
        self.sequences[row] = None
        self.is_active[row] = False
        return sequence, self.blocks[row, : self.num_blocks[row]].copy()

    def add_blocks(self, row: int, blocks: Blocks) -> None:
        start = int(self.num_blocks[row])
        self.blocks[row, start : start + len(blocks)] = blocks
        self.num_blocks[row] = start + len(blocks)

    def append(self, rows_R: Rows_R, tokens_R: Rows_R, logprobs_R: NDArray[np.float32], version: int) -> None:
        """One drawn token for each of these rows."""
        ends_R = self.length[rows_R]
        self.tokens[rows_R, ends_R] = tokens_R
        self.logprobs[rows_R, ends_R] = logprobs_R
        self.versions[rows_R, ends_R] = version
        self.length[rows_R] += 1

    def max_top(self, rows_R: Rows_R) -> int:
        """How many most likely tokens the most curious of these rows wants."""
        return 0 if self._num_top is None else int(self._num_top[rows_R].max(initial=0))

    def is_stop(self, rows_R: Rows_R, tokens_R: Rows_R) -> NDArray[np.bool_]:
        """Which of these tokens are stop tokens of their rows."""
        stops_R = np.zeros(len(rows_R), dtype=bool)
        sets_R = self.stop_set[rows_R]
        for index in np.unique(sets_R):
            stops_R |= (sets_R == index) & np.isin(tokens_R, self._stop_arrays[index])
        return stops_R

    def _set_num_top(self, row: int, count: int) -> None:
        if self._num_top is None and count > 0:
            self._num_top = np.zeros(len(self.is_active), dtype=np.int64)
        if self._num_top is not None:
            self._num_top[row] = count

    def _stop_index(self, stop_ids: tuple[int, ...]) -> int:
        if stop_ids not in self._stop_sets:
            self._stop_sets[stop_ids] = len(self._stop_arrays)
            self._stop_arrays.append(np.asarray(stop_ids, dtype=np.int64))
        return self._stop_sets[stop_ids]


def _widened(array: NDArray, width: int, fill: int) -> NDArray:
    wide = np.full((array.shape[0], width), fill, dtype=array.dtype)
    wide[:, : array.shape[1]] = array
    return wide
