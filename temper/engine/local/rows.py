"""State of all running sequences as arrays, one row each, so that a decode step does no Python work per sequence.

Owns: tokens, block tables, counters of what is running. Refuses: deciding what runs (scheduler.py).
Shapes: _R rows, _S tokens drawn in one burst, _T tokens.
"""

from __future__ import annotations

import contextlib
import copy
import heapq
import mmap

import numpy as np
from numpy.typing import NDArray

from temper.engine.local.blocks import SCRATCH_BLOCK, Blocks
from temper.engine.local.sampling import Draws
from temper.engine.local.sequence import NO_ROW, Sequence

Rows_R = NDArray[np.int64]
Tokens_RS = NDArray[np.int64]

NO_TOKEN = -1
NO_VERSION = np.iinfo(np.int64).min
"""Version of a row that has drawn nothing yet."""
TOKEN = np.int32
"""Dtype in which token ids are kept. At four bytes each, 4,096 rows of 64k tokens take a gigabyte."""


class Rows:
    """`max_running` rows. Columns grow when a longer sequence arrives; what no row has used yet takes no memory."""

    def __init__(self, max_running: int, block_size: int, overshoot: int = 0) -> None:
        self.block_size = block_size
        self._overshoot = overshoot
        """Tokens beyond its limit that a row may compute in a burst: its block table reaches that far, as scratch."""
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
        self.top_k = np.zeros(max_running, dtype=np.int64)
        self.top_p = np.ones(max_running)
        self.min_p = np.zeros(max_running)
        self.wants_entropy = np.zeros(max_running, dtype=bool)
        self.is_special = np.zeros(max_running, dtype=bool)
        """Rows whose sequence wants a look at each token."""
        self.stop_ids = np.full((max_running, 0), NO_TOKEN, dtype=np.int64)
        self.tokens = np.zeros((max_running, 0), dtype=TOKEN)
        self.logprobs = np.zeros((max_running, 0), dtype=np.float32)
        self.blocks = np.zeros((max_running, 0), dtype=np.int64)
        assert SCRATCH_BLOCK == 0, "zeros are scratch, and cost nothing until they are written"
        self._version = np.full(max_running, NO_VERSION, dtype=np.int64)
        """Version of the weights by which each row drew last."""
        self._runs: list[list[tuple[int, int]]] = [[] for _ in range(max_running)]
        """By row, (length, version): from this length on it drew by this version. A version rarely changes midway."""
        self._free = list(range(max_running))
        """A heap: the first free row is taken."""
        self._num_top: Rows_R | None = None
        """Most likely tokens each row wants. None: nobody ever asked, and no step pays for the question."""
        self._arrivals = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def reserve(self, length: int) -> None:
        """Makes room for sequences of this many tokens."""
        if length <= self.tokens.shape[1]:
            return
        width = max(length, 2 * self.tokens.shape[1])
        lengths = np.where(self.is_active, self.length, 0)
        self.tokens = _lengthened(self.tokens, width, lengths)
        self.logprobs = _lengthened(self.logprobs, width, lengths)
        self.blocks = _lengthened(self.blocks, -(-width // self.block_size), self.num_blocks)

    def enter(self, sequence: Sequence, limit: int) -> int:
        """Moves a sequence into a free row and returns the row."""
        assert self._free, "no free row"
        row = heapq.heappop(self._free)
        self.reserve(limit + self._overshoot)
        length, prompt = len(sequence.token_ids), sequence.num_prompt
        self.sequences[row] = sequence
        sequence.row = row
        self.is_active[row] = True
        self.length[row], self.num_computed[row] = length, sequence.num_computed
        self.num_prompt[row], self.limit[row] = prompt, limit
        params = sequence.request.params
        self.temperature[row] = params.temperature
        self.top_k[row], self.top_p[row], self.min_p[row] = params.top_k, params.top_p, params.min_p
        self.wants_entropy[row], self.is_special[row] = params.entropy, sequence.is_special
        self.random_key[row] = sequence.random_key
        self._set_stop_ids(row, params.stop_ids)
        self._set_num_top(row, params.top_logprobs)
        self.arrival[row] = self._arrivals
        self._arrivals += 1
        self.tokens[row, :length] = sequence.token_ids
        self.logprobs[row, prompt:length] = sequence.logprobs
        self._version[row] = NO_VERSION
        self._runs[row].clear()
        self.blocks[row, : self.num_blocks[row]] = SCRATCH_BLOCK
        self.num_blocks[row] = 0
        self.add_blocks(row, sequence.blocks)
        return row

    def leave(self, row: int) -> tuple[Sequence, Blocks]:
        """Takes a sequence out, its tokens copied back; returns it and the block references it held."""
        sequence = self.sequence(row)
        self._copy_back(sequence, row)
        sequence.row = NO_ROW
        sequence.num_computed = 0
        sequence.blocks = np.empty(0, dtype=np.int64)
        self.sequences[row] = None
        self.is_active[row] = False
        heapq.heappush(self._free, row)
        return sequence, self.blocks[row, : self.num_blocks[row]].copy()

    def look(self, row: int) -> Sequence:
        """A copy of a sequence that goes on, with all that it has drawn."""
        seen = copy.copy(self.sequence(row))
        self._copy_back(seen, row)
        return seen

    def _copy_back(self, sequence: Sequence, row: int) -> None:
        prompt, length = int(self.num_prompt[row]), int(self.length[row])
        sequence.token_ids = self.tokens[row, :length].astype(np.int64)
        sequence.logprobs = self.logprobs[row, prompt:length].copy()
        sequence.versions = np.concatenate((sequence.versions, self._drawn_by(row)))

    def _drawn_by(self, row: int) -> NDArray[np.int64]:
        """The version of each token drawn in this row since its sequence entered."""
        starts, versions = np.asarray(self._runs[row], dtype=np.int64).reshape(-1, 2).T
        return np.repeat(versions, np.diff(starts, append=self.length[row]))

    def sequence(self, row: int) -> Sequence:
        sequence = self.sequences[row]
        assert sequence is not None, "an active row holds a sequence"
        return sequence

    def is_decode(self) -> NDArray[np.bool_]:
        """Rows with one token to compute, a drawn one. A prompt's last token is prefill: others may start from it."""
        return self.is_active & (self.length - self.num_computed == 1) & (self.length > self.num_prompt)

    def is_prefill(self, row: int) -> bool:
        """Whether this active row is not one of is_decode()."""
        return bool(self.length[row] - self.num_computed[row] != 1 or self.length[row] <= self.num_prompt[row])

    def add_blocks(self, row: int, blocks: Blocks) -> None:
        start = int(self.num_blocks[row])
        self.blocks[row, start : start + len(blocks)] = blocks
        self.num_blocks[row] = start + len(blocks)

    def extend(self, rows_R: Rows_R, counts_R: Rows_R, blocks: Blocks) -> None:
        """Gives each of these rows its count of the blocks."""
        places = np.arange(len(blocks)) - np.repeat(np.cumsum(counts_R) - counts_R, counts_R)
        self.blocks[np.repeat(rows_R, counts_R), np.repeat(self.num_blocks[rows_R], counts_R) + places] = blocks
        self.num_blocks[rows_R] += counts_R

    def cut(self, rows_R: Rows_R, tokens_RS: Tokens_RS) -> tuple[Rows_R, NDArray[np.bool_]]:
        """How many of these tokens each row keeps, up to its limit or its first stop token, and whether it met one."""
        is_stop_RS = (tokens_RS[:, :, None] == self.stop_ids[rows_R][:, None, :]).any(2)
        until_stop_R = np.where(is_stop_RS.any(1), is_stop_RS.argmax(1) + 1, tokens_RS.shape[1] + 1)
        room_R = np.minimum(self.limit[rows_R] - self.length[rows_R], tokens_RS.shape[1])
        return np.minimum(until_stop_R, room_R), until_stop_R <= room_R

    def append(
        self, rows_R: Rows_R, tokens_RS: Tokens_RS, logprobs_RS: NDArray[np.float32], kept_R: Rows_R, version: int
    ) -> None:
        """The first kept_R drawn tokens of each of these rows. All but the last have been computed as well."""
        is_kept_RS = np.arange(tokens_RS.shape[1]) < kept_R[:, None]
        row_T = np.repeat(rows_R, kept_R)
        position_T = (self.length[rows_R][:, None] + np.arange(tokens_RS.shape[1]))[is_kept_RS]
        self.tokens[row_T, position_T] = tokens_RS[is_kept_RS]
        self.logprobs[row_T, position_T] = logprobs_RS[is_kept_RS]
        for row in rows_R[self._version[rows_R] != version].tolist():
            self._runs[row].append((int(self.length[row]), version))
        self._version[rows_R] = version
        self.length[rows_R] += kept_R
        self.num_computed[rows_R] = self.length[rows_R] - 1

    def drawn_tail(self, row: int, count: int) -> list[int]:
        """At most this many of the tokens drawn last."""
        length = int(self.length[row])
        tail: list[int] = self.tokens[row, max(int(self.num_prompt[row]), length - count) : length].tolist()
        return tail

    def draws(self, rows_R: Rows_R) -> Draws:
        """How the next token of each of these rows is drawn."""
        return Draws(
            temperature_R=self.temperature[rows_R],
            random_key_R=self.random_key[rows_R],
            position_R=self.length[rows_R],
            top_k_R=self.top_k[rows_R],
            top_p_R=self.top_p[rows_R],
            min_p_R=self.min_p[rows_R],
            num_top=self.max_top(rows_R),
            entropy=bool(self.wants_entropy[rows_R].any()),
        )

    def max_top(self, rows_R: Rows_R) -> int:
        """How many most likely tokens the most curious of these rows wants."""
        return 0 if self._num_top is None else int(self._num_top[rows_R].max(initial=0))

    def _set_num_top(self, row: int, count: int) -> None:
        if self._num_top is None and count > 0:
            self._num_top = np.zeros(len(self.is_active), dtype=np.int64)
        if self._num_top is not None:
            self._num_top[row] = count

    def _set_stop_ids(self, row: int, stop_ids: tuple[int, ...]) -> None:
        if len(stop_ids) > self.stop_ids.shape[1]:
            self.stop_ids = _widened(self.stop_ids, len(stop_ids), NO_TOKEN)
        self.stop_ids[row] = NO_TOKEN
        self.stop_ids[row, : len(stop_ids)] = stop_ids


def _lengthened(array: NDArray, width: int, lengths_R: Rows_R) -> NDArray:
    """A wider array of zeros with the first of these lengths of each row. Nothing else is touched, so that the system
    gives memory for what is held and not for what might be."""
    wide = _untouched_zeros((array.shape[0], width), array.dtype)
    for row in np.flatnonzero(lengths_R).tolist():
        wide[row, : lengths_R[row]] = array[row, : lengths_R[row]]
    return wide


def _untouched_zeros(shape: tuple[int, int], dtype: np.dtype) -> NDArray:
    """Zeros that take memory where they are written. Not numpy's: it asks for huge pages, of which one holds the starts
    of many rows, so that every row would take all of its width."""
    size = shape[0] * shape[1] * dtype.itemsize
    if not size or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return np.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=dtype).reshape(shape)


def _widened(array: NDArray, width: int, fill: int) -> NDArray:
    wide = np.full((array.shape[0], width), fill, dtype=array.dtype)
    wide[:, : array.shape[1]] = array
    return wide
