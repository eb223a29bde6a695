"""Chunks of prompts as one pass; small passes as CUDA graphs, since launching their kernels outlasts running them.

Owns: how chunks lie end to end, the fixed tensors a graph reads, which sizes are worth a recording.
Refuses: knowing requests, drawing (runner.py).
Shapes: _T tokens, N rows, M blocks per row, D width of the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from temper.engine.local.blocks import SCRATCH_BLOCK
from temper.engine.local.graphs import GraphLimits, Record, bucket
from temper.engine.local.rows import Rows
from temper.engine.local.scheduler import Schedule

MOST_TOKENS = 4096
"""Most tokens of a recorded pass. Larger passes keep a GPU busy for longer than they take to launch."""
MOST_GRAPHS = 48
WORTH_RECORDING = 2
"""A size is recorded once it was met this often. Passes before that are computed without a recording."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """What one pass computes: a chunk of each row, one behind the other."""

    tokens_T: NDArray[np.int64]
    positions_T: NDArray[np.int64]
    slots_T: NDArray[np.int64]
    """Where in the cache each token's keys and values go."""
    blocks_NM: NDArray[np.int64]
    starts_N: NDArray[np.int64]
    """Position of the first token of each chunk."""
    counts_N: NDArray[np.int64]
    wanted: NDArray[np.int64]
    """Places, among the tokens, whose hidden states are asked for: the last of rows that are now computed."""

    @staticmethod
    def of(schedule: Schedule, rows: Rows) -> Chunks:
        counts, starts = schedule.count_R, schedule.start_R
        ends = np.cumsum(counts)
        row_T = np.repeat(schedule.prefill_R, counts)
        position_T = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
        width = int(-(-(starts + counts).max() // rows.block_size))
        block_T = rows.blocks[row_T, position_T // rows.block_size]
        is_done = starts + counts == rows.length[schedule.prefill_R]
        return Chunks(
            tokens_T=rows.tokens[row_T, position_T].astype(np.int64),
            positions_T=position_T,
            slots_T=block_T * rows.block_size + position_T % rows.block_size,
            blocks_NM=rows.blocks[schedule.prefill_R, :width],
            starts_N=starts,
            counts_N=counts,
            wanted=ends[is_done] - 1,
        )

    @staticmethod
    def none() -> Chunks:
        """A pass that computes nothing."""
        empty = np.zeros(0, dtype=np.int64)
        columns = ("tokens_T", "positions_T", "slots_T", "starts_N", "counts_N", "wanted")
        return Chunks(**dict.fromkeys(columns, empty), blocks_NM=empty.reshape(0, 0))

    @property
    def query_starts(self) -> NDArray[np.int64]:
        """[N + 1]: which tokens belong to which row."""
        return np.concatenate(([0], np.cumsum(self.counts_N)))

    @property
    def longest(self) -> int:
        return int(self.counts_N.max())


class ChunkTensors(NamedTuple):
    """Chunks on the device."""

    tokens_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    blocks_NM: Tensor
    starts_N: Tensor
    query_starts: Tensor


Forward = Callable[[ChunkTensors, int], Tensor]
"""(chunks, no chunk is longer than this) -> hidden states [T, D]; stores the tokens' keys and values."""


class Size(NamedTuple):
    """What a graph is recorded for: at least as much as it is replayed with."""

    tokens: int
    rows: int
    longest: int


LEAST = Size(tokens=256, rows=8, longest=256)
"""Smaller passes are padded to this."""


class ChunkGraphs:
    def __init__(self, forward: Forward, limits: GraphLimits, device: torch.device, record: Record) -> None:
        self._forward, self._record = forward, record
        rows = bucket(limits.max_rows)
        self._integers_3T = torch.zeros((3, MOST_TOKENS), dtype=torch.int64, device=device)
        self._blocks_NM = torch.full((rows, limits.max_blocks), SCRATCH_BLOCK, dtype=torch.int64, device=device)
        self._starts_2N = torch.zeros((2, rows), dtype=torch.int64, device=device)
        """First position of each chunk, and the places whose states are wanted."""
        self._query_starts = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self._seen: Counter[Size] = Counter()
        self._recorded: dict[Size, tuple[Callable[[], None], Tensor]] = {}

    def wanted_states(self, chunks: Chunks) -> Tensor | None:
        """[wanted, D]. None: a pass of this size gains nothing from a graph."""
        size = self.size_of(len(chunks.tokens_T), len(chunks.counts_N), chunks.longest)
        if size is None:
            return None
        self._fill(chunks, size)
        if size not in self._recorded:
            self._seen[size] += 1
            if self._seen[size] < WORTH_RECORDING or len(self._recorded) >= MOST_GRAPHS:
                # As large as a replay: a resumed run counts anew, and must get the same bits.
                return self._run(size)[: len(chunks.wanted)]
            # Recording computes the pass, which stores what every replay stores.
            self._recorded[size] = self._record(partial(self._run, size))
        replay, states_ND = self._recorded[size]
        replay()
        return states_ND[: len(chunks.wanted)]

    def size_of(self, num_tokens: int, num_rows: int, longest: int) -> Size | None:
        """Of the graph for such a pass; None: it gains nothing from one."""
        size = _rounded(Size(num_tokens, num_rows, longest), len(self._blocks_NM))
        return size if size.tokens <= MOST_TOKENS else None

    def record_ahead(self, size: Size) -> None:
        """Records the graph with nobody in it: its tokens belong to no row, and the scratch block takes what they
        store. How often passes of this size were met is not changed."""
        if size not in self._recorded and len(self._recorded) < MOST_GRAPHS:
            self._fill(Chunks.none(), size)
            self._recorded[size] = self._record(partial(self._run, size))

    def _run(self, size: Size) -> Tensor:
        tokens_T, positions_T, slots_T = self._integers_3T[:, : size.tokens]
        starts_N, wanted_N = self._starts_2N[:, : size.rows]
        rows = (self._blocks_NM[: size.rows], starts_N, self._query_starts[: size.rows + 1])
        return self._forward(ChunkTensors(tokens_T, positions_T, slots_T, *rows), size.longest)[wanted_N]

    def _fill(self, chunks: Chunks, size: Size) -> None:
        """Tokens beyond the last belong to no row: nothing attends to them, and the scratch block takes what they
        store. Rows beyond the last have no tokens."""
        count, num_rows = len(chunks.tokens_T), len(chunks.counts_N)
        integers = np.zeros((3, size.tokens), dtype=np.int64)
        integers[:, :count] = chunks.tokens_T, chunks.positions_T, chunks.slots_T
        starts = np.zeros((2, size.rows), dtype=np.int64)
        starts[0, :num_rows] = chunks.starts_N
        starts[1, : len(chunks.wanted)] = chunks.wanted
        query_starts = np.full(size.rows + 1, count, dtype=np.int64)
        query_starts[: num_rows + 1] = chunks.query_starts
        # Filled on the device: tables as wide as the longest sequence that may ever come are mostly scratch.
        self._blocks_NM[: size.rows].fill_(SCRATCH_BLOCK)
        for target, source in (
            (self._integers_3T[:, : size.tokens], integers),
            (self._starts_2N[:, : size.rows], starts),
            (self._query_starts[: size.rows + 1], query_starts),
            (self._blocks_NM[:num_rows, : chunks.blocks_NM.shape[1]], chunks.blocks_NM),
        ):
            target.copy_(torch.from_numpy(source), non_blocking=True)


def _rounded(asked: Size, most_rows: int) -> Size:
    """Powers of two, and no small ones: requests that come as others end make passes of every size, and to record one
    takes as long as many replays."""
    size = Size(*(max(least, 1 << (count - 1).bit_length()) for least, count in zip(LEAST, asked, strict=True)))
    return size._replace(rows=min(size.rows, most_rows))
