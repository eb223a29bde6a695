"""Runs the model for one scheduled step and draws the tokens. The only engine file that touches tensors and devices.

Owns: turning rows into tensors, the forward passes, the transfer back to the host. Recorded decode steps: graphs.py.
Refuses: knowing requests. Decode and prefill are two passes of one step: only the first has a replayable shape.
Shapes: _T tokens, _R rows, N rows of a pass, M blocks per row, _K most likely tokens, _S steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from temper.engine.local.attention import DecodeAttend, GpuAttend, PagedCache, PrefillAttend
from temper.engine.local.chunks import ChunkGraphs, Chunks, ChunkTensors
from temper.engine.local.graphs import CudaRecorder, DecodeGraphs, DecodeWork, GraphLimits, Record
from temper.engine.local.rows import Rows, Rows_R
from temper.engine.local.sampling import Drawn, Draws, Table, draw
from temper.engine.local.scheduler import ReadRoutes, Schedule
from temper.engine.local.warming import ExpectedRequests, chunk_sizes, decode_keys
from temper.models.decode_step.step import DecodeStep, RowPlaces, can_step, has_room
from temper.models.decode_step.tiles import MOST_ROWS
from temper.models.decoder import can_walk, numerics_of
from temper.models.experts.products import can_group
from temper.models.experts.routes import RouteTable
from temper.models.experts.routing import expert_layers, has_experts
from temper.models.nan import explain_nan
from temper.models.states import Head, hidden_states


class Runner:
    """Holds the model, the cache and, on a GPU, the recorded decode steps."""

    def __init__(
        self, model: Any, cache: PagedCache, *, device: torch.device, graphs: GraphLimits | None,
        record: Record | None = None, routes: RouteTable | None = None,
    ) -> None:  # fmt: skip
        """graphs: how large recorded decode steps may become; None: nothing is recorded.

        record: how steps are recorded; None: as CUDA graphs. With one given, a CPU does all that a GPU would.

        routes: where the experts of every token are kept; None: nobody asks.
        """
        self._model, self._cache, self._device = model, cache, device
        self._is_gpu = device.type == "cuda" or record is not None
        self._is_exact = numerics_of(model) == "exact"
        self._head = Head.of(model)
        self._routes = routes
        self._graphs: DecodeGraphs | None = None
        self._chunk_graphs: ChunkGraphs | None = None
        self._step: DecodeStep | None = None
        """Goes through the model in decode steps of few rows, where it can."""
        if graphs is not None and self._is_gpu and not _waits_for_host(model):
            record = record or CudaRecorder()
            if has_room(device) and can_step(model):
                self._step = DecodeStep(model, cache.layer, graphs.table_width(cache.block_size) * cache.block_size)
            work = DecodeWork(self._decode_pass, self._logits, self._splits)
            self._graphs = DecodeGraphs(work, graphs, cache.block_size, device, record)
            self._chunk_graphs = ChunkGraphs(self._chunk_pass, graphs, device, record)
        self._multiprocessors = 1
        if device.type == "cuda":
            self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count

    @property
    def vocabulary_size(self) -> int:
        return int(self._head.weight.shape[0])

    @property
    def can_burst(self) -> bool:
        """Whether decode() takes more than one step."""
        return self._graphs is not None

    @torch.no_grad()
    def refresh_head(self) -> None:
        """Takes the head's wider copy again, where there is one; after new weights the old one would be stale.

        In place where steps are recorded: they go on reading where they read when they were recorded.
        """
        head = Head.of(self._model)
        if self._graphs is None:
            self._head = head
            return
        for held, fresh in ((self._head.weight, head.weight), (self._head.bias, head.bias)):
            if held is not None and fresh is not None and held.data_ptr() != fresh.data_ptr():
                held.copy_(fresh)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        source, target = torch.tensor(copies, device=self._device).T
        self._cache.copy_blocks(source, target)
        if self._routes is not None:
            self._routes.copy_blocks(source, target)

    @property
    def read_routes(self) -> ReadRoutes | None:
        """Experts of tokens by where they lie; None: they are not recorded."""
        return None if self._routes is None else torch.inference_mode()(self._routes.read)

    @torch.inference_mode()
    def decode(self, decode_R: Rows_R, rows: Rows, steps: int) -> Table:
        """The next `steps` tokens of every row; more than one only of plain rows on a GPU."""
        draws = rows.draws(decode_R)
        if self._graphs is not None and draws.is_plain:
            return self._graphs.draw(decode_R, rows, steps)
        assert steps == 1, "only a GPU draws several tokens in a row"
        if self._graphs is not None:
            return self.draw(self._graphs.hidden(decode_R, rows), draws)
        positions = rows.length[decode_R] - 1
        width = int(-(-(positions.max() + 1) // rows.block_size))
        last_R = rows.tokens[decode_R, positions].astype(np.int64)
        tokens_N, positions_N = self._tensor(last_R), self._tensor(positions)
        blocks_NM, longest = self._tensor(rows.blocks[decode_R, :width]), int(positions.max()) + 1
        hidden_ND = self._decode_pass(tokens_N, positions_N, blocks_NM, self._splits(len(decode_R), longest))
        return self.draw(hidden_ND, draws)

    @torch.inference_mode()
    def prefill(self, schedule: Schedule, rows: Rows) -> Tensor:
        """Computes the chunks; returns the last hidden state of every row whose known tokens are now all computed."""
        chunks = Chunks.of(schedule, rows)
        if self._chunk_graphs is not None and (states := self._chunk_graphs.wanted_states(chunks)) is not None:
            return states
        arrays = (chunks.tokens_T, chunks.positions_T, chunks.slots_T, chunks.blocks_NM, chunks.starts_N)
        tensors = ChunkTensors(*(self._tensor(array) for array in (*arrays, chunks.query_starts)))
        return self._chunk_pass(tensors, chunks.longest)[self._tensor(chunks.wanted)]

    @torch.inference_mode()
    def draw(self, hidden_RD: Tensor, draws: Draws) -> Table:
        """A token for each of these states; a state may come several times."""
        logits_RV = self._logits(hidden_RD)
        if not self._is_gpu or draws.is_truncated:
            return draw(logits_RV, draws)
        from temper.models.kernels.draw import draw_tokens

        integers = self._tensor(np.stack((draws.random_key_R.view(np.int64), draws.position_R)))
        temperature_R = torch.from_numpy(draws.temperature_R).to(self._device, non_blocking=True)
        tokens_R, logprobs_R = draw_tokens(logits_RV, temperature_R, integers[0], integers[1])
        drawn = {"tokens_RS": tokens_R.unsqueeze(1), "logprobs_RS": logprobs_R.unsqueeze(1)}
        return Table(**drawn) if draws.is_plain else replace(draw(logits_RV, draws), **drawn)

    def recordings(self, expected: ExpectedRequests, tokens_per_step: int) -> list[Callable[[], None]]:
        """What is compiled and recorded for these requests, piece by piece, in the order in which it saves memory.

        Nothing is drawn for anybody: no request, random key or cached prefix is touched. Empty: nothing is recorded.
        """
        if self._graphs is None or self._chunk_graphs is None:
            return []
        keys = decode_keys(self._graphs, expected)
        sizes = chunk_sizes(self._chunk_graphs, expected, tokens_per_step)
        pieces: list[Callable[[], None]] = [
            *(partial(self._graphs.record_ahead, key) for key in keys),
            *(partial(self._chunk_graphs.record_ahead, size) for size in sizes),
            partial(self._draw_for_nobody, expected.first_draw),
        ]
        return [torch.inference_mode()(piece) for piece in pieces]

    def _draw_for_nobody(self, draws: Draws) -> None:
        """First tokens are drawn outside of recorded steps."""
        width, dtype = self._head.weight.shape[1], next(self._model.parameters()).dtype
        self.fetch([self.draw(torch.zeros((1, width), dtype=dtype, device=self._device), draws)])

    def fetch(self, tables: Sequence[Table]) -> list[Drawn]:
        """Everything that was drawn, on the host. Tokens and log-probabilities of all tables come in one transfer."""
        if not tables:
            return []
        # A token id below 2**53 survives float64, and so does a float32 log-probability.
        flat = torch.cat([t.double().flatten() for table in tables for t in (table.tokens_RS, table.logprobs_RS)])
        host, start = _host(flat), 0
        fetched = []
        for table in tables:
            shape, size = tuple(table.tokens_RS.shape), table.tokens_RS.numel()
            tokens, logprobs = host[start : start + size], host[start + size : start + 2 * size]
            start += 2 * size
            fetched.append(
                Drawn(
                    tokens_RS=tokens.astype(np.int64).reshape(shape),
                    logprobs_RS=logprobs.astype(np.float32).reshape(shape),
                    top_ids_RK=None if table.top_ids_RK is None else _host(table.top_ids_RK.int()),
                    top_logprobs_RK=None if table.top_logprobs_RK is None else _host(table.top_logprobs_RK.float()),
                    entropy_R=None if table.entropy_R is None else _host(table.entropy_R.float()),
                    keep_ids=None if table.kept_RV is None else _keep_ids(table.kept_RV),
                )
            )
        return fetched

    def explain_nan(self, token_ids: Sequence[int]) -> str:
        """What is not finite in the model or on the way of these tokens; "" when nothing is."""
        return explain_nan(self._model, token_ids)

    def _logits(self, hidden_RD: Tensor) -> Tensor:
        return self._head.logits(hidden_RD)

    def _chunk_pass(self, chunks: ChunkTensors, longest: int) -> Tensor:
        attend: PrefillAttend | GpuAttend
        if self._is_gpu:
            attend = GpuAttend(
                cache=self._cache,
                slots_T=chunks.slots_T,
                blocks_NM=chunks.blocks_NM,
                positions_N=chunks.starts_N,
                query_starts=chunks.query_starts,
                longest_query=longest,
                splits=0,
            )
        else:
            counts_N = chunks.query_starts.diff()
            rows = (chunks.blocks_NM, chunks.starts_N, counts_N)
            attend = PrefillAttend(self._cache, chunks.slots_T, *rows, exact=self._is_exact)
        return self._hidden_states(chunks.tokens_T, chunks.positions_T, attend, chunks.slots_T)

    def _decode_pass(self, tokens_N: Tensor, positions_N: Tensor, blocks_NM: Tensor, splits: int) -> Tensor:
        if self._step is not None and len(tokens_N) <= MOST_ROWS:
            routes = None if self._routes is None else self._routes.at(self._slots(positions_N, blocks_NM))
            return self._step.states(tokens_N, RowPlaces(positions_N, blocks_NM, splits), routes)
        slots_N = self._slots(positions_N, blocks_NM)
        attend: DecodeAttend | GpuAttend
        if self._is_gpu:
            attend = GpuAttend(
                cache=self._cache,
                slots_T=slots_N,
                blocks_NM=blocks_NM,
                positions_N=positions_N,
                query_starts=torch.arange(len(tokens_N) + 1, device=self._device),
                longest_query=1,
                splits=splits,
            )
        else:
            attend = DecodeAttend(self._cache, slots_N, blocks_NM, positions_N + 1, exact=self._is_exact)
        return self._hidden_states(tokens_N, positions_N, attend, slots_N)

    def _slots(self, positions_N: Tensor, blocks_NM: Tensor) -> Tensor:
        """Where keys and values of these positions lie, one of each row."""
        block_size = self._cache.block_size
        block_N = blocks_NM.gather(1, (positions_N // block_size).unsqueeze(1)).squeeze(1)
        return block_N * block_size + positions_N % block_size

    def _hidden_states(self, tokens_T: Tensor, positions_T: Tensor, attend: Any, slots_T: Tensor) -> Tensor:
        routes = None if self._routes is None else self._routes.at(slots_T)
        return hidden_states(self._model, tokens_T, positions_T, attend, routes)

    def _splits(self, num_rows: int, longest: int) -> int:
        """Few long rows are shared out among all multiprocessors; 0 in exact mode, whose kernel does not split."""
        if self._is_exact or not self._is_gpu:
            return 0
        from temper.models.kernels.tiled_attention import choose_splits

        return choose_splits(num_rows, self._cache.num_kv_heads, longest, self._multiprocessors)

    def _tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)


def _waits_for_host(model: Any) -> bool:
    """Whether a pass over experts asks the device how many rows each has: such a step cannot be recorded."""
    if not has_experts(model) or not can_walk(model) or next(model.parameters()).device.type != "cuda":
        return False
    layers = model.get_decoder().layers
    return not all(can_group(layers[place].mlp.experts.gate_up_proj) for place in expert_layers(model))


def _keep_ids(kept_RV: Tensor) -> list[NDArray[np.int32]]:
    ids, ends = _host(kept_RV.nonzero()[:, 1].int()), _host(kept_RV.sum(1).cumsum(0)).tolist()
    return [ids[start:end] for start, end in pairwise((0, *ends))]


def _host(tensor: Tensor) -> NDArray[Any]:
    """The tensor on the host. The wait is not inside the copy: a copy to ordinary memory keeps CUDA's lock until it is
    done, so that a trainer in another thread could launch nothing meanwhile."""
    if tensor.device.type != "cuda":
        return tensor.numpy()
    pinned = tensor.to("cpu", non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    done.synchronize()
    return pinned.numpy()
