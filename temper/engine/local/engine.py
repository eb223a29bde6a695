"""The local sampler: continuous batching in this process over the module that the trainer trains.

Owns: the asyncio face of the engine, which requests it takes, taking over new weights. The step itself: step.py.
Refuses: tasks, rewards. Token ids in, token ids out; text only to find where a stop text is complete.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from temper.engine.digests import held_digests
from temper.engine.in_flight import InFlight
from temper.engine.local.attention import PagedCache
from temper.engine.local.graphs import GraphLimits
from temper.engine.local.runner import Runner
from temper.engine.local.scheduler import Scheduler, so_far
from temper.engine.local.sequence import Sequence, StopTexts, Watch, random_key
from temper.engine.local.step import Stepper
from temper.engine.local.warming import ExpectedRequests
from temper.errors import BackendError, ContextFull, OutOfMemory, TaskError
from temper.models.experts.routes import RouteTable, route_shape
from temper.models.float8.layers import float8_layers
from temper.models.load import shape_of
from temper.models.save import saved_tensors
from temper.types import Completion, Finish, Publication, Request, SamplingParams

SETTLING_PASSES = 3
"""Turns of the event loop without a new request before a step. Episodes that were just answered hand in their next
request first, so what is batched together depends on the data and not on timing."""
LONGEST_REST_SECONDS = 7 * 24 * 3600.0
"""A trainer that holds the device for longer is dead."""


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
    steps_per_sync: int = 1
    """Tokens of each sequence drawn before the host looks again, where the device can do that by itself."""
    prefix_cache: bool = True
    """Blocks of texts that were computed before are used again, until the weights change or room is needed."""
    kv_after_load: Literal["keep", "recompute"] = "keep"
    """Keys and values of running sequences when the weights change."""
    routes: bool = False
    """Whether completions tell the experts of every token, prompt included."""


class LocalEngine:
    """Implements protocols.Sampler."""

    def __init__(
        self,
        model: Any,
        settings: EngineSettings,
        *,
        version: int = 0,
        decode: Callable[[list[int]], str] | None = None,
        runner: Runner | None = None,
    ) -> None:
        """decode: text of token ids, needed by requests with stop texts only.

        runner: None: one for the model's device.
        """
        self._model = model
        self._settings = settings
        self._version = version
        self._decode = decode
        self._runner = runner or _runner(model, settings)
        self._scheduler = Scheduler(
            max_running=settings.max_running,
            block_size=settings.block_size,
            num_blocks=settings.num_blocks,
            tokens_per_step=settings.tokens_per_step,
            max_length=settings.max_length,
            steps_per_sync=settings.steps_per_sync if self._runner.can_burst else 1,
            prefix_cache=settings.prefix_cache,
        )
        self._scheduler.routes.read = self._runner.read_routes
        self._stepper = Stepper(self._scheduler, self._runner)
        self._driver: asyncio.Task[None] | None = None
        self._may_step = asyncio.Event()
        self._may_step.set()
        self._num_requests = 0
        self._in_flight = InFlight()
        self._waiting: set[asyncio.Future[Completion]] = set()
        self._failure: BaseException | None = None

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, request: Request, *, watch: Watch | None = None) -> Completion:
        """`watch` is called on the event loop with each piece that was drawn. If it raises, only this request fails."""
        self._check(request)
        if self._failure is not None:
            raise _failed(self._failure)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()

        def deliver(completion: Completion) -> None:
            if not future.done():
                future.set_result(completion)

        sequence = Sequence(
            request,
            random_key(self._settings.seed, request.id),
            deliver,
            watch=None if watch is None else _guarded(watch, future),
            stop_texts=StopTexts(request.params.stop, self._decode) if request.params.stop and self._decode else None,
            routes=self._scheduler.routes.none,
        )
        self._scheduler.add(sequence)
        self._num_requests += 1
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive(), name="local engine")
        with self._in_flight.request():
            return await self._delivered(future, sequence)

    async def abort(self, request_id: str) -> None:
        self._scheduler.stop(request_id, Finish.ABORT)

    async def interrupt(self, request_id: str) -> None:
        self._scheduler.stop(request_id, Finish.INTERRUPT)

    async def load(self, publication: Publication) -> None:
        """Copies what is not shared already, and quantises what is held in float8, one tensor after the other. Running
        sequences go on with the new weights; their versions tell."""
        own, quantized = saved_tensors(self._model), float8_layers(self._model)
        if missing := sorted(own.keys() ^ publication.tensors.keys()):
            raise BackendError(
                f"publication {publication.version} and the engine's model differ in {missing[:3]}; nothing was loaded"
            )
        for name, tensor in (publication.alike or publication.tensors).items():
            if tensor.shape != own[name].shape or (tensor.dtype != own[name].dtype and name not in quantized):
                raise BackendError(
                    f"publication {publication.version}: {name} is {tuple(tensor.shape)} {tensor.dtype}, "
                    f"the engine has {tuple(own[name].shape)} {own[name].dtype}; nothing was loaded"
                )
        with torch.no_grad():
            for name, tensor in publication.tensors.items():
                if name in quantized:
                    quantized[name].take(tensor)
                elif tensor.data_ptr() != own[name].data_ptr():
                    own[name].copy_(tensor)
        self._runner.refresh_head()
        self._scheduler.change_weights(recompute=self._settings.kv_after_load == "recompute")
        self._version = publication.version

    def so_far(self, least: Mapping[str, int]) -> dict[str, Completion]:
        """What was drawn of these requests, by id, where it is so many tokens or more; they go on."""
        found = {request_id: so_far(self._scheduler, request_id, tokens) for request_id, tokens in least.items()}
        return {request_id: drawn for request_id, drawn in found.items() if drawn is not None}

    async def digests(self) -> Mapping[str, str]:
        """Of the weights that draw the next token, for comparison with those that were published."""
        return held_digests(self._model)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While the context is open, requests wait and the device is left to whoever else computes on it. Taking turns
        is faster than side by side: small decode steps would queue behind large ones, and both have one interpreter."""
        self._may_step.clear()
        try:
            with self._in_flight.held():
                yield
        finally:
            self._may_step.set()

    async def warm_up(self, expected: ExpectedRequests, tell: Callable[[int, int], None]) -> None:
        """Compiles and records, on a GPU, what these requests will need. What is drawn later, and every count, is the
        same as without it. `tell` hears, before each recording, how many are done, and of how many."""
        assert not self.has_work, "a recording would overwrite what running requests draw"
        rows = min(expected.num_rows, self._settings.max_running)
        expected = replace(
            expected, num_rows=rows, longest=min(expected.longest, self._settings.max_length),
            num_prompts=min(expected.num_prompts, rows),
        )  # fmt: skip
        try:
            recordings = self._runner.recordings(expected, self._settings.tokens_per_step)
            with self.paused():
                for done, record in enumerate(recordings):
                    tell(done, len(recordings))
                    record()
                    await asyncio.sleep(0)  # a run may be stopped meanwhile
        except torch.OutOfMemoryError as error:  # the steps themselves would not fit either
            raise _failed(error) from error

    def stats(self) -> Mapping[str, float]:
        """Since the last call. kv_use is the peak; running, waiting and occupancy are means over steps; tokens per
        second are over the time spent in steps."""
        return {**self._stepper.meter.since_last(), "drawing_seconds": self._in_flight.seconds()}

    def utilisation(self) -> Mapping[str, float]:
        """Gauges of now and totals since the start, named for a scraper of metrics. Reading resets nothing."""
        return self._stepper.meter.utilisation()

    async def close(self) -> None:
        if self._driver is not None and not self._driver.done():
            self._driver.cancel()
            await asyncio.wait([self._driver], timeout=10.0)
        self._break(BackendError("it was closed"))

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    async def _drive(self) -> None:
        """Steps while there is work. Runs in the event loop, so a step never sees half of what an episode does."""
        try:
            await self._settle()
            while self._scheduler.has_work:
                async with asyncio.timeout(LONGEST_REST_SECONDS):
                    await self._may_step.wait()
                burst = self._stepper.begin(self._version)
                await self._settle()  # episodes read and score what they got, while the device draws a burst
                if burst is not None:
                    self._stepper.end(burst)
        except Exception as error:
            self._break(error)

    async def _settle(self) -> None:
        quiet, seen = 0, self._num_requests
        while quiet < SETTLING_PASSES:
            await asyncio.sleep(0)
            quiet = quiet + 1 if self._num_requests == seen else 0
            seen = self._num_requests

    async def _delivered(self, future: asyncio.Future[Completion], sequence: Sequence) -> Completion:
        """Waits for the completion. A caller that is cancelled, or whose watcher failed, ends its request.

        Unblocked by: the driver, which delivers or breaks. This does not watch the driver's task as well: hundreds of
        requests that watch one task would cost each other time.
        """
        self._waiting.add(future)
        try:
            return await future
        finally:
            self._waiting.discard(future)
            # Not by id alone: another request may have it by now. A broken engine stopped in the middle of a step.
            if self._failure is None and self._scheduler.live.get(sequence.request.id) is sequence:
                self._scheduler.stop(sequence.request.id, Finish.ABORT)

    def _break(self, error: Exception) -> None:
        """Fails every request that waits, and every later one."""
        self._failure = self._failure or error
        for future in self._waiting:
            if not future.done():
                future.set_exception(_failed(self._failure))

    def _check(self, request: Request) -> None:
        settings, params, length = self._settings, request.params, len(request.prompt_ids)
        if request.id in self._scheduler.live:
            raise TaskError(f'a request with the id "{request.id}" is running already: give each request its own id')
        if length == 0:
            raise TaskError("the prompt has no tokens")
        if length >= settings.max_length:
            raise ContextFull(
                f"the prompt has {length} tokens and the longest sequence is {settings.max_length}: no room to answer"
            )
        vocabulary = self._runner.vocabulary_size
        for name, ids in (("the prompt", request.prompt_ids), ("stop_ids", params.stop_ids)):
            if min(ids, default=0) < 0 or max(ids, default=0) >= vocabulary:
                wrong = next(token for token in ids if not 0 <= token < vocabulary)
                raise TaskError(f"{name}: token {wrong} is outside the vocabulary of 0 to {vocabulary - 1}")
        check_params(params, vocabulary)
        if params.stop and self._decode is None:
            raise TaskError(
                f"stop={list(params.stop)} needs text, and this engine has token ids only: give LocalEngine the "
                "tokenizer's decode, or use stop_ids"
            )
        longest = min(length + params.max_new_tokens, settings.max_length)
        if -(-longest // settings.block_size) >= settings.num_blocks:
            raise TaskError(
                f"a sequence of {longest} tokens does not fit into the KV cache: raise engine.kv_tokens above {longest}"
            )


def _failed(cause: BaseException) -> BackendError:
    is_full = isinstance(cause, torch.OutOfMemoryError)
    error = OutOfMemory("rollout", cause) if is_full else BackendError(f"the engine failed: {cause!r}")
    error.__cause__ = cause
    return error


def check_params(params: SamplingParams, vocabulary: int) -> None:
    """Refuses what cannot be applied. Comparisons are written so that NaN fails them."""
    rules = (
        ("temperature", "finite and at least 0", 0 <= params.temperature < math.inf),
        ("max_new_tokens", "at least 1", params.max_new_tokens >= 1),
        ("top_k", "at least 0 (0: all tokens)", params.top_k >= 0),
        ("top_p", "above 0 and at most 1", 0 < params.top_p <= 1),
        ("min_p", "at least 0 and below 1", 0 <= params.min_p < 1),
        ("stop", "texts that are not empty", all(params.stop)),
        ("top_logprobs", f"0 to the vocabulary of {vocabulary}", 0 <= params.top_logprobs <= vocabulary),
    )
    for name, allowed, is_good in rules:
        if not is_good:
            raise TaskError(f"{name}={getattr(params, name)} cannot be applied: use {allowed}")


def make_cache(model: Any, settings: EngineSettings) -> PagedCache:
    shape, parameter = shape_of(model.config), next(model.parameters())
    return PagedCache(
        num_layers=shape.num_layers,
        num_blocks=settings.num_blocks,
        block_size=settings.block_size,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=parameter.dtype,
        device=parameter.device,
    )


def _runner(model: Any, settings: EngineSettings) -> Runner:
    limits = GraphLimits(
        max_rows=settings.max_running,
        max_blocks=-(-settings.max_length // settings.block_size),
        max_steps=settings.steps_per_sync,
    )
    device = next(model.parameters()).device
    routes = None
    if settings.routes:
        routes = RouteTable(route_shape(model), settings.num_blocks, settings.block_size, device)
    graphs = limits if settings.cuda_graphs else None
    return Runner(model, make_cache(model, settings), device=device, graphs=graphs, routes=routes)


def _guarded(watch: Watch, future: asyncio.Future[Completion]) -> Watch:
    """A watcher that raises fails its own future, and is not called again."""

    def guarded(token_ids: list[int], logprobs: list[float]) -> None:
        if future.done():
            return
        try:
            watch(token_ids, logprobs)
        except Exception as error:
            failure = TaskError(f"whoever watched this request failed: {error!r}")
            failure.__cause__ = error
            future.set_exception(failure)

    return guarded
