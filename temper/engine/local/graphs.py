"""Decode steps as CUDA graphs: the device computes and draws several tokens per row before the host looks again.

Owns: the fixed tensors a graph reads and writes, the sizes it is recorded for. Refuses: knowing requests, and requests
that want more than tokens and log-probabilities (runner.py draws those from the hidden states).
Shapes: N rows of a graph, _R rows in use, M blocks per row, S steps.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from temper.engine.local.rows import Rows, Rows_R
from temper.engine.local.sampling import Table
from temper.engine.local.tables import BlockTables


class DecodeWork(NamedTuple):
    """What a decode step is made of."""

    forward: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    """(tokens [N], positions [N], blocks [N, M], splits) -> hidden states [N, D]; stores keys and values of the
    tokens."""
    logits: Callable[[Tensor], Tensor]
    splits: Callable[[int, int], int]
    """(rows, about how long the longest is) -> in how many parts the keys of a row are read at once."""


class GraphKey(NamedTuple):
    """What makes a recorded step another one."""

    size: int
    splits: int
    draws: bool
    """Whether it draws the next token, too, in place of ending with the hidden states."""


SHORT = 256
"""Rows shorter than this count as this long."""
LITTLE_MEMORY = 0.1
"""With a smaller share free, cached memory is given back before a graph takes its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphLimits:
    max_rows: int
    max_blocks: int
    """Blocks of a row that holds the longest sequence."""
    max_steps: int
    """Tokens drawn between two looks of the host."""

    def table_width(self, block_size: int) -> int:
        """Blocks of a row, those included that it draws into beyond its limit: what it draws there is thrown away."""
        return self.max_blocks + -(-self.max_steps // block_size) + 1


Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""(work) -> (do it again, on what its tensors hold by then; the tensor it writes its result to)."""


class DecodeGraphs:
    def __init__(
        self, work: DecodeWork, limits: GraphLimits, block_size: int, device: torch.device, record: Record
    ) -> None:  # fmt: skip
        self._work, self._record = work, record
        rows = bucket(limits.max_rows)
        integers = torch.zeros((3, rows), dtype=torch.int64, device=device)
        self._tokens_N, self._positions_N, self._keys_N = integers
        self._temperature_N = torch.ones(rows, device=device)
        self.tables = BlockTables(rows, limits.table_width(block_size), device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._drawn_SN = torch.zeros((limits.max_steps, rows), dtype=torch.int64, device=device)
        self._logprobs_SN = torch.zeros((limits.max_steps, rows), device=device)
        self._recorded: dict[GraphKey, tuple[Callable[[], None], Tensor]] = {}

    def hidden(self, decode_R: Rows_R, rows: Rows) -> Tensor:
        """Hidden states of every row's last token."""
        self._fill(decode_R, rows)
        replay, output = self._graph(self.key_of(len(decode_R), _longest(decode_R, rows), draws=False))
        replay()
        return output[: len(decode_R)]

    def draw(self, decode_R: Rows_R, rows: Rows, steps: int) -> Table:
        """The next `steps` tokens of every row. The table is valid until the next call."""
        self._fill(decode_R, rows)
        replay, _ = self._graph(self.key_of(len(decode_R), _longest(decode_R, rows), draws=True))
        for _ in range(steps):
            replay()
        count = len(decode_R)
        return Table(tokens_RS=self._drawn_SN[:steps, :count].T, logprobs_RS=self._logprobs_SN[:steps, :count].T)

    def _fill(self, decode_R: Rows_R, rows: Rows) -> None:
        count, size = len(decode_R), bucket(len(decode_R))
        positions = rows.length[decode_R] - 1
        # Rows beyond the count compute the first position of the scratch block.
        integers = np.zeros((3, size), dtype=np.int64)
        integers[0, :count] = rows.tokens[decode_R, positions]
        integers[1, :count] = positions
        integers[2, :count] = rows.random_key[decode_R].view(np.int64)
        moved = _to(integers, self._step.device)
        for target, source in zip((self._tokens_N, self._positions_N, self._keys_N), moved, strict=True):
            target[:size].copy_(source)
        self._temperature_N[:count].copy_(_to(rows.temperature[decode_R], self._step.device))
        self.tables.seat(decode_R, rows, size)
        self._step.zero_()

    def key_of(self, num_rows: int, longest: int, *, draws: bool) -> GraphKey:
        """Which graph steps so many rows, the longest of them about this long."""
        size = bucket(num_rows)
        return GraphKey(size, self._work.splits(size, rounded_length(longest)), draws)

    def record_ahead(self, key: GraphKey) -> None:
        """Records the graph with nobody in it: all rows compute the first position of the scratch block. Whoever was
        seated is seated anew by the next step."""
        self.tables.clear()
        self._tokens_N.zero_()
        self._positions_N.zero_()
        self._graph(key)

    def _graph(self, key: GraphKey) -> tuple[Callable[[], None], Tensor]:
        """The graph, recorded the first time it is needed."""
        if key not in self._recorded:
            moved = (self._tokens_N, self._positions_N)
            saved = [tensor.clone() for tensor in moved]
            self._recorded[key] = self._record(partial(self._run, key))
            # Recording ran the work and moved the rows on. Keys and values it wrote are written again by replays.
            for tensor, value in zip(moved, saved, strict=True):
                tensor.copy_(value)
            self._step.zero_()
        return self._recorded[key]

    def _run(self, key: GraphKey) -> Tensor:
        from temper.models.kernels.draw import draw_tokens, keep_drawn

        size = key.size
        tokens_N, positions_N = self._tokens_N[:size], self._positions_N[:size]
        hidden_ND = self._work.forward(tokens_N, positions_N, self.tables.blocks_NM[:size], key.splits)
        if not key.draws:
            return hidden_ND
        drawn_N, logprobs_N = draw_tokens(
            self._work.logits(hidden_ND), self._temperature_N[:size], self._keys_N[:size], positions_N + 1
        )
        keep_drawn(drawn_N, logprobs_N, self._drawn_SN, self._logprobs_SN, tokens_N, positions_N, self._step)
        return drawn_N


class CudaRecorder:
    def __init__(self) -> None:
        # One pool for all graphs: only one of them runs at a time, and its output is consumed before the next.
        self._pool = torch.cuda.graph_pool_handle()
        # And one stream: what is cached for a stream, and the workspaces of libraries, no other can use.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels compile and libraries allocate on first use, which a capture forbids
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        free, total = torch.cuda.mem_get_info()
        if free < total * LITTLE_MEMORY:
            torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph(): that gives all cached memory back, which the trainer would have to ask for anew.
        stream.wait_stream(torch.cuda.current_stream())
        with _no_collection(), torch.cuda.stream(stream):
            # Other threads may train or score meanwhile: only what this one does is forbidden to allocate or wait.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph.replay, output


@contextmanager
def _no_collection() -> Iterator[None]:
    """Nothing is collected inside: to destroy an older engine's graph while one is recorded spoils the recording."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def bucket(count: int) -> int:
    """The next size a graph is recorded for: few enough to record quickly, close enough to waste little."""
    return 1 << (count - 1).bit_length() if count <= 256 else -(-count // 128) * 128


def rounded_length(length: int) -> int:
    """Down to a power of two: few values, as another one may need another recording."""
    return max(SHORT, 1 << (length.bit_length() - 1))


def _longest(decode_R: Rows_R, rows: Rows) -> int:
    return int(rows.length[decode_R].max())


def _to(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
