"""Runs the model for one scheduled step and draws the tokens. The only engine file that touches tensors and devices.

Owns: turning rows into tensors, the forward passes, CUDA graphs of decode steps.
Refuses: knowing requests. Decode and prefill are two passes of one step: only the first has a replayable shape.
Shapes: _T tokens, _R rows, N rows of a pass, M blocks per row, _K most likely tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from temper.engine.local.attention import DecodeAttend, PagedCache, PrefillAttend
from temper.engine.local.blocks import SCRATCH_BLOCK
from temper.engine.local.rows import Rows, Rows_R
from temper.engine.local.sampling import most_likely, sample, tempered_logprobs
from temper.engine.local.scheduler import Schedule
from temper.models.load import Head, hidden_states


@dataclass(slots=True)
class DecodeInputs:
    """Tensors of one decode pass. Under a CUDA graph they are the graph's fixed inputs."""

    tokens_N: Tensor
    positions_N: Tensor
    slots_N: Tensor
    blocks_NM: Tensor
    lengths_N: Tensor

    @staticmethod
    def empty(num_rows: int, width: int, device: torch.device) -> DecodeInputs:
        """Rows that read and write the scratch block only."""
        scratch = torch.full((num_rows, width), SCRATCH_BLOCK, dtype=torch.int64, device=device)
        return DecodeInputs(
            tokens_N=scratch[:, 0].clone(),
            positions_N=scratch[:, 0].clone(),
            slots_N=scratch[:, 0].clone(),
            blocks_NM=scratch,
            lengths_N=torch.ones_like(scratch[:, 0]),
        )

    def copy_(self, other: DecodeInputs) -> None:
        """Fills the first rows with another step's inputs; rows beyond write to the scratch block."""
        count = len(other.tokens_N)
        for name in ("tokens_N", "positions_N", "slots_N", "lengths_N"):
            getattr(self, name)[:count].copy_(getattr(other, name), non_blocking=True)
        self.slots_N[count:] = SCRATCH_BLOCK
        self.lengths_N[count:] = 1
        self.blocks_NM[count:] = SCRATCH_BLOCK
        self.blocks_NM[:count, : other.blocks_NM.shape[1]].copy_(other.blocks_NM, non_blocking=True)


@dataclass(slots=True)
class CapturedDecode:
    graph: Any
    inputs: DecodeInputs
    hidden_ND: Tensor


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a step drew, on the host."""

    tokens_R: Rows_R
    logprobs_R: NDArray[np.float32]
    top_ids_RK: NDArray[np.int64] | None = None
    """The most likely tokens first. None: no row asked for any."""
    top_logprobs_RK: NDArray[np.float32] | None = None


class Runner:
    """Holds the model, the cache and the captured graphs."""

    def __init__(self, model: Any, cache: PagedCache, *, device: torch.device, cuda_graphs: bool) -> None:
        self._model = model
        self._cache = cache
        self._device = device
        self._uses_graphs = cuda_graphs and device.type == "cuda"
        self._captured: dict[tuple[int, int], CapturedDecode] = {}
        # One pool for all graphs: only one of them runs at a time, and its output is consumed before the next.
        self._graph_pool = torch.cuda.graph_pool_handle() if self._uses_graphs else None
        self._head = Head.of(model)

    @property
    def vocabulary_size(self) -> int:
        return int(self._head.weight.shape[0])

    def refresh_head(self) -> None:
        """Takes the head's float32 copy again. A bf16 head is a copy; after new weights the old one would be stale."""
        self._head = Head.of(self._model)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        source, target = torch.tensor(copies, device=self._device).T
        self._cache.copy_blocks(source, target)

    @torch.inference_mode()
    def forward(self, schedule: Schedule, rows: Rows) -> Tensor:
        """Logits of every row that draws a token, in the order of Scheduler.advance: decode, then prefill."""
        hidden = []
        if len(schedule.decode_R):
            hidden.append(self._decode(schedule.decode_R, rows))
        if len(schedule.prefill_R):
            hidden.append(self._prefill(schedule, rows))
        return self._head.logits(torch.cat(hidden) if len(hidden) > 1 else hidden[0])

    @torch.inference_mode()
    def draw(
        self, logits_RV: Tensor, temperature_R: NDArray[np.float32], uniform_R: NDArray[np.float32], num_top: int
    ) -> Drawn:
        """Tokens and log-probabilities on the host: the one synchronisation of a step."""
        inputs = torch.from_numpy(np.stack((temperature_R, uniform_R))).to(self._device)
        logprobs_RV = tempered_logprobs(logits_RV, inputs[0])
        tokens_R, logprobs_R = sample(logprobs_RV, inputs[0], inputs[1])
        # One transfer: a token id below 2**53 survives float64, and so does a float32 log-probability.
        both = torch.stack((tokens_R.double(), logprobs_R.double()))
        if num_top == 0:
            tokens, logprobs = both.cpu().numpy()
            return Drawn(tokens.astype(np.int64), logprobs.astype(np.float32))
        top_ids_RK, top_logprobs_RK = most_likely(logprobs_RV, num_top)
        table = torch.cat((both, top_ids_RK.T.double(), top_logprobs_RK.T.double())).cpu().numpy()
        return Drawn(
            table[0].astype(np.int64),
            table[1].astype(np.float32),
            table[2 : 2 + num_top].T.astype(np.int64),
            table[2 + num_top :].T.astype(np.float32),
        )

    def _decode(self, decode_R: Rows_R, rows: Rows) -> Tensor:
        positions = rows.length[decode_R] - 1
        width = int(-(-(positions.max() + 1) // rows.block_size))
        inputs = DecodeInputs(
            tokens_N=self._tensor(rows.tokens[decode_R, positions]),
            positions_N=self._tensor(positions),
            slots_N=self._tensor(_slots(rows, decode_R, positions)),
            blocks_NM=self._tensor(rows.blocks[decode_R, :width]),
            lengths_N=self._tensor(positions + 1),
        )
        if not self._uses_graphs:
            return self._decode_pass(inputs)
        captured = self._capture(_bucket(len(decode_R)), _bucket(width))
        captured.inputs.copy_(inputs)
        captured.graph.replay()
        return captured.hidden_ND[: len(decode_R)]

    def _decode_pass(self, inputs: DecodeInputs) -> Tensor:
        attend = DecodeAttend(self._cache, inputs.slots_N, inputs.blocks_NM, inputs.lengths_N)
        return hidden_states(self._model, inputs.tokens_N, inputs.positions_N, attend)

    def _capture(self, num_rows: int, width: int) -> CapturedDecode:
        """The graph for this many rows and blocks per row, recorded the first time it is needed."""
        if (captured := self._captured.get((num_rows, width))) is not None:
            return captured
        inputs = DecodeInputs.empty(num_rows, width, self._device)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries allocate their workspaces on first use, which a capture forbids
            for _ in range(2):
                self._decode_pass(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool):
            hidden_ND = self._decode_pass(inputs)
        self._captured[num_rows, width] = CapturedDecode(graph, inputs, hidden_ND)
        return self._captured[num_rows, width]

    def _prefill(self, schedule: Schedule, rows: Rows) -> Tensor:
        """Hidden states of the last token of every row whose known tokens are now all computed."""
        counts, starts = schedule.count_R, schedule.start_R
        ends = np.cumsum(counts)
        row_T = np.repeat(schedule.prefill_R, counts)
        position_T = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
        width = int(-(-(starts + counts).max() // rows.block_size))
        attend = PrefillAttend(
            self._cache,
            self._tensor(_slots(rows, row_T, position_T)),
            self._tensor(rows.blocks[schedule.prefill_R, :width]),
            self._tensor(starts),
            self._tensor(counts),
        )
        hidden_TD = hidden_states(
            self._model, self._tensor(rows.tokens[row_T, position_T]), self._tensor(position_T), attend
        )
        is_done = starts + counts == rows.length[schedule.prefill_R]
        return hidden_TD[self._tensor(ends[is_done] - 1)]

    def _tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)


def _slots(rows: Rows, row_T: Rows_R, position_T: NDArray[np.int64]) -> NDArray[np.int64]:
    """Place in the cache of each (row, position)."""
    block_T = rows.blocks[row_T, position_T // rows.block_size]
    return block_T * rows.block_size + position_T % rows.block_size


def _bucket(count: int) -> int:
    """The next size a graph is captured for: few enough to capture quickly, close enough to waste little."""
    return 1 << (count - 1).bit_length() if count <= 64 else -(-count // 64) * 64
