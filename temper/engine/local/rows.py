"""State of all running sequences as arrays, one row each, so that a decode step does no Python work per sequence.

Owns: tokens, block tables, counters of what is running. Refuses: deciding what runs (scheduler.py).
Shapes: _R rows, _S tokens drawn in one burst, _T tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from temper.engine.local.blocks import SCRATCH_BLOCK, Blocks
from temper.engine.local.sampling import Draws
from temper.engine.local.sequence import Sequence

Rows_R = NDArray[np.int64]
Tokens_RS = NDArray[np.int64]

NO_TOKEN = -1


class Rows:
    """`max_running` rows. Columns grow when a longer sequence arrives."""

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
        self.tokens = np.zeros((max_running, 0), dtype=np.int64)
        self.logprobs = np.zeros((max_running, 0), dtype=np.float32)
        self.versions = np.zeros((max_running, 0), dtype=np.int64)
        self.blocks = np.full((max_running, 0), SCRATCH_BLOCK, dtype=np.int64)
        self._num_top: Rows_R | None = None
        """Most likely tokens each row wants. None: nobody ever asked, and no step pays for the question."""
        self._arrivals = 0

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
        self.reserve(limit + self._overshoot)
        length, prompt = len(sequence.token_ids), sequence.num_prompt
        self.sequences[row] = sequence
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
        self.versions[row, prompt:length] = sequence.versions
        self.blocks[row] = SCRATCH_BLOCK
        self.num_blocks[row] = 0
        self.add_blocks(row, sequence.blocks)
        return row

    def leave(self, row: int) -> tuple[Sequence, Blocks]:
        """Takes a sequence out, its tokens copied back; returns it and the block references it held."""
        sequence = self.sequence(row)
        prompt, length = int(self.num_prompt[row]), int(self.length[row])
        sequence.token_ids = self.tokens[row, :length].copy()
        sequence.logprobs = self.logprobs[row, prompt:length].copy()
        sequence.versions = self.versions[row, prompt:length].copy()
        sequence.num_computed = 0
        sequence.blocks = np.empty(0, dtype=np.int64)
        self.sequences[row] = None
        self.is_active[row] = False
        return sequence, self.blocks[row, : self.num_blocks[row]].copy()

    def sequence(self, row: int) -> Sequence:
        sequence = self.sequences[row]
        assert sequence is not None, "an active row holds a sequence"
        return sequence

    def is_decode(self) -> NDArray[np.bool_]:
        """One token to compute, and it was drawn: the last token of a prompt is prefill, others may start from it."""
        return self.is_active & (self.length - self.num_computed == 1) & (self.length > self.num_prompt)

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
        self.versions[row_T, position_T] = version
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


def _widened(array: NDArray, width: int, fill: int) -> NDArray:
    wide = np.full((array.shape[0], width), fill, dtype=array.dtype)
    wide[:, : array.shape[1]] = array
    return wide
