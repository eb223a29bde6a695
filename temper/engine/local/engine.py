"""The local sampler: continuous batching in this process over the module that the trainer trains.

Owns: the step (schedule, run, sample, postprocess), the asyncio face of the engine, taking over new weights.
Refuses: text, tasks, rewards. Token ids in, token ids out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from temper.engine.local.attention import PagedCache
from temper.engine.local.rows import Rows_R
from temper.engine.local.runner import Drawn, Runner
from temper.engine.local.sampling import uniforms
from temper.engine.local.scheduler import Scheduler
from temper.engine.local.sequence import Sequence, random_key
from temper.errors import BackendError, ContextFull, TaskError
from temper.models.load import shape_of
from temper.types import Completion, Finish, Publication, Request

SETTLING_PASSES = 3
"""Turns of the event loop without a new request before a step. Episodes that were just answered hand in their next
request first, so what is batched together depends on the data and not on timing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    seed: int
    block_size: int
    num_blocks: int
    max_running: int
    tokens_per_step: int
    max_length: int
    """Longest sequence, prompt included: the model's context or less."""
    cuda_graphs: bool = True


class LocalEngine:
    """Implements protocols.Sampler."""

    def __init__(self, model: Any, settings: EngineSettings, *, version: int = 0) -> None:
        shape, parameter = shape_of(model.config), next(model.parameters())
        self._model = model
        self._settings = settings
        self._version = version
        self._scheduler = Scheduler(
            max_running=settings.max_running,
            block_size=settings.block_size,
            num_blocks=settings.num_blocks,
            tokens_per_step=settings.tokens_per_step,
            max_length=settings.max_length,
        )
        cache = PagedCache(
            num_layers=shape.num_layers,
            num_blocks=settings.num_blocks,
            block_size=settings.block_size,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=parameter.dtype,
            device=parameter.device,
        )
        self._runner = Runner(model, cache, device=parameter.device, cuda_graphs=settings.cuda_graphs)
        self._driver: asyncio.Task[None] | None = None
        self._num_requests = 0
        self._counts: dict[str, float] = {}
        self._failure: BaseException | None = None

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, request: Request) -> Completion:
        self._check(request)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()

        def deliver(completion: Completion) -> None:
            if not future.done():
                future.set_result(completion)

        key = random_key(self._settings.seed, request.id)
        self._scheduler.add(Sequence(request, key, deliver, list(request.prompt_ids)))
        self._num_requests += 1
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive(), name="local engine")
        return await self._delivered(future, request.id)

    async def abort(self, request_id: str) -> None:
        self._scheduler.abort(request_id)

    async def load(self, publication: Publication) -> None:
        """Copies what is not shared already. Keys and values of running sequences are kept; their versions tell."""
        own = dict(self._model.named_parameters())
        if missing := sorted(own.keys() ^ publication.tensors.keys()):
            raise BackendError(
                f"publication {publication.version} and the engine's model differ in {missing[:3]}; nothing was loaded"
            )
        for name, tensor in publication.tensors.items():
            if tensor.shape != own[name].shape or tensor.dtype != own[name].dtype:
                raise BackendError(
                    f"publication {publication.version}: {name} is {tuple(tensor.shape)} {tensor.dtype}, "
                    f"the engine has {tuple(own[name].shape)} {own[name].dtype}; nothing was loaded"
                )
        with torch.no_grad():
            for name, tensor in publication.tensors.items():
                if tensor.data_ptr() != own[name].data_ptr():
                    own[name].copy_(tensor)
        self._runner.refresh_head()
        self._version = publication.version

    def stats(self) -> Mapping[str, float]:
        counters = self._scheduler.counters
        counts = {
            "steps": self._counts.get("steps", 0.0),
            "prefill_tokens": self._counts.get("prefill_tokens", 0.0),
            "decode_tokens": self._counts.get("decode_tokens", 0.0),
            "kv_use": self._counts.get("kv_use", 0.0),
            "preemptions": float(counters.preemptions),
            "shared_prefills": float(counters.shared_prefills),
        }
        counters.preemptions = counters.shared_prefills = 0
        self._counts = {}
        return counts

    async def close(self) -> None:
        if self._driver is not None and not self._driver.done():
            self._driver.cancel()
            await asyncio.wait([self._driver], timeout=10.0)

    def step(self) -> None:
        """One step of everything that runs: schedule, run, sample, postprocess."""
        schedule = self._scheduler.schedule()
        if copies := self._scheduler.counters.copies:
            self._runner.copy_blocks(copies)
            copies.clear()
        if schedule.is_empty:
            return
        logits_RV = self._runner.forward(schedule, self._scheduler.rows)
        drawing_R = self._scheduler.advance(schedule)
        self._count(len(schedule.decode_R), int(schedule.count_R.sum()))
        if len(drawing_R):
            self._draw(logits_RV, drawing_R)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def _draw(self, logits_RV: torch.Tensor, drawing_R: Rows_R) -> None:
        """Draws a token for each row, and a first token for each request that shares a prompt just computed."""
        rows = self._scheduler.rows
        followers = self._scheduler.followers_of(drawing_R)
        places = np.concatenate((np.arange(len(drawing_R)), np.asarray([p for p, _ in followers], dtype=np.int64)))
        temperature = rows.temperature[drawing_R[places]]
        keys = rows.random_key[drawing_R[places]]
        for offset, (_, follower) in enumerate(followers, start=len(drawing_R)):
            temperature[offset] = follower.request.params.temperature
            keys[offset] = follower.random_key
        if followers:
            logits_RV = logits_RV[torch.from_numpy(places).to(logits_RV.device)]
        positions = rows.length[drawing_R[places]]
        num_top = max((f.request.params.top_logprobs for _, f in followers), default=0)
        num_top = max(num_top, rows.max_top(drawing_R))
        drawn = self._runner.draw(logits_RV, temperature, uniforms(keys, positions), num_top)
        if num_top:
            self._record_top(drawing_R, followers, drawn)
        count = len(drawing_R)
        # Followers first: a leader that ends with this token gives its blocks back.
        self._start_followers(drawing_R, followers, drawn.tokens_R[count:], drawn.logprobs_R[count:])
        self._append(drawing_R, drawn.tokens_R[:count], drawn.logprobs_R[:count])

    def _record_top(self, drawing_R: Rows_R, followers: list[tuple[int, Sequence]], drawn: Drawn) -> None:
        """Into the sequences at once, not into rows: they outlive preemption, and few requests ask for it."""
        assert drawn.top_ids_RK is not None
        assert drawn.top_logprobs_RK is not None
        running = (self._scheduler.rows.sequences[row] for row in drawing_R.tolist())
        sequences = (*running, *(follower for _, follower in followers))
        for sequence, ids, logprobs in zip(
            sequences, drawn.top_ids_RK.tolist(), drawn.top_logprobs_RK.tolist(), strict=True
        ):
            assert sequence is not None, "a row that draws holds a sequence"
            sequence.record_top(ids, logprobs)

    def _append(self, drawing_R: Rows_R, tokens_R: Rows_R, logprobs_R: Any) -> None:
        rows = self._scheduler.rows
        rows.append(drawing_R, tokens_R, logprobs_R, self._version)
        is_stop_R = rows.is_stop(drawing_R, tokens_R)
        is_cut_R = rows.length[drawing_R] >= rows.limit[drawing_R]
        for place in np.flatnonzero(is_stop_R | is_cut_R).tolist():
            self._scheduler.finish(int(drawing_R[place]), Finish.STOP if is_stop_R[place] else Finish.LENGTH)

    def _start_followers(
        self, drawing_R: Rows_R, followers: list[tuple[int, Sequence]], tokens: Rows_R, logprobs: Any
    ) -> None:
        parked = []
        for (place, follower), token, logprob in zip(followers, tokens.tolist(), logprobs.tolist(), strict=True):
            follower.token_ids.append(token)
            follower.logprobs.append(logprob)
            follower.versions.append(self._version)
            if token in follower.request.params.stop_ids:
                follower.complete(Finish.STOP)
            elif len(follower.token_ids) >= self._scheduler.limit_of(follower):
                follower.complete(Finish.LENGTH)
            else:
                self._scheduler.fork(int(drawing_R[place]), follower)
                parked.append(follower)
        self._scheduler.park(parked)

    def _count(self, decode: int, prefill: int) -> None:
        counts = self._counts
        counts["steps"] = counts.get("steps", 0) + 1
        counts["decode_tokens"] = counts.get("decode_tokens", 0) + decode
        counts["prefill_tokens"] = counts.get("prefill_tokens", 0) + prefill
        counts["kv_use"] = max(counts.get("kv_use", 0.0), self._scheduler.pool.use)

    async def _drive(self) -> None:
        """Steps while there is work. Runs in the event loop, so a step never sees half of what an episode does."""
        try:
            while True:
                await self._settle()
                if not self._scheduler.has_work:
                    return
                self.step()
        except Exception as error:
            self._failure = error

    async def _settle(self) -> None:
        quiet, seen = 0, self._num_requests
        while quiet < SETTLING_PASSES:
            await asyncio.sleep(0)
            quiet = quiet + 1 if self._num_requests == seen else 0
            seen = self._num_requests

    async def _delivered(self, future: asyncio.Future[Completion], request_id: str) -> Completion:
        """Waits for the completion or for the engine's failure, whichever comes first. Cancelling ends the request."""
        assert self._driver is not None
        try:
            while not future.done():
                # The driver can end between two requests and be replaced, so the one of now is watched.
                await asyncio.wait((future, self._driver), return_when=asyncio.FIRST_COMPLETED, timeout=60.0)
                if self._failure is not None:
                    raise BackendError(f"the engine failed: {self._failure!r}") from self._failure
            return future.result()
        except asyncio.CancelledError:
            self._scheduler.abort(request_id)
            raise

    def _check(self, request: Request) -> None:
        settings, length = self._settings, len(request.prompt_ids)
        if length == 0:
            raise TaskError("the prompt has no tokens")
        if length >= settings.max_length:
            raise ContextFull(
                f"the prompt has {length} tokens and the longest sequence is {settings.max_length}: no room to answer"
            )
        asked, vocabulary = request.params.top_logprobs, self._runner.vocabulary_size
        if not 0 <= asked <= vocabulary:
            raise TaskError(
                f"top_logprobs={asked} asks for the most likely tokens at each position, and the model has a "
                f"vocabulary of {vocabulary}: use 0 (none) to {vocabulary}"
            )
        longest = min(length + request.params.max_new_tokens, settings.max_length)
        if -(-longest // settings.block_size) >= settings.num_blocks:
            raise TaskError(
                f"a sequence of {longest} tokens does not fit into the KV cache: raise engine.kv_tokens above {longest}"
            )
