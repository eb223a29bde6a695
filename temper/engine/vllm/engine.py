"""vLLM as a sampler: its asynchronous engine, started from this process, behind Temper's seam.

Owns: requests in flight, publication of weights as a transaction, which weights drew which token, that a dead or silent
vLLM is an EngineLost. Starting it: start.py.
Refuses: text, and to generate after a publication that failed half-way. Written against vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from temper.engine.in_flight import InFlight
from temper.engine.manifest import Manifest
from temper.engine.vllm.sampling import read_back, require_supported, to_completion, to_vllm
from temper.engine.vllm.sending import WeightSender
from temper.engine.vllm.start import VllmSettings, start_vllm
from temper.errors import BackendError, ContextFull, EngineLost, TaskError, TemperError, UserError
from temper.models.load import ModelShape, read_shape
from temper.types import Completion, Finish, Publication, Request

if TYPE_CHECKING:
    from temper.engine.local.warming import ExpectedRequests

ASLEEP = "vLLM sleeps: call wake() first"
CPU_BLOCK = 32
LOOK_SECONDS = 60.0
"""At most, between two looks whether vLLM still makes steps: it is seen that much later that it does not."""
STOP_SECONDS = 3.0
"""Time for vLLM to end by itself; then its processes are killed."""
Answer = TypeVar("Answer")


class Monitor:
    """Counts what vLLM reports after each of its steps. Has the shape of vLLM's StatLoggerBase."""

    def __init__(self) -> None:
        self.counts: dict[str, float] = {}
        self.last_step = time.monotonic()

    def __call__(self, _config: Any, _engine_index: int = 0) -> Monitor:
        """vLLM takes a factory; there is one engine, so it is this."""
        return self

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        self.last_step = time.monotonic()
        if scheduler_stats is not None:
            self.counts["kv_use"] = max(self.counts.get("kv_use", 0.0), scheduler_stats.kv_cache_usage)
            self.counts["running"] = float(scheduler_stats.num_running_reqs)
            self.counts["waiting"] = float(scheduler_stats.num_waiting_reqs)
            self._add("prefix_hit_tokens", scheduler_stats.prefix_cache_stats.hits)
        if iteration_stats is not None:
            self._add("steps", 1)
            self._add("prefill_tokens", iteration_stats.prompt_token_stats.computed)
            self._add("decode_tokens", iteration_stats.num_generation_tokens)
            self._add("preemptions", iteration_stats.num_preempted_reqs)

    def _add(self, name: str, amount: float) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + amount

    def log_engine_initialized(self) -> None: ...

    def log(self) -> None: ...

    def record_sleep_state(self, *_: Any) -> None: ...


COUNTERS = (
    "steps",
    "prefill_tokens",
    "decode_tokens",
    "kv_use",
    "preemptions",
    "running",
    "waiting",
    "prefix_hit_tokens",
)


class VllmEngine:
    """Implements protocols.Sampler. vLLM starts with the first call, which takes a while."""

    def __init__(self, settings: VllmSettings, *, version: int = 0) -> None:
        if settings.device == "cpu" and settings.block_size is not None and settings.block_size % CPU_BLOCK:
            raise UserError(f"block_size={settings.block_size}: vLLM on a CPU takes multiples of {CPU_BLOCK} only")
        self._settings = settings
        self._shape: ModelShape = read_shape(settings.folder)
        self._version = version
        self._engine: Any = None
        self._starting: asyncio.Future[Any] | None = None
        self._monitor = Monitor()
        self._lock = asyncio.Lock()
        self._in_flight: dict[str, Finish | None] = {}
        """By request id: how it is being ended from outside, if it is."""
        self._drawing = InFlight()
        self._refusal: str | None = None
        """Why nothing may be drawn now."""
        self._is_asleep, self._has_weights = False, True
        self._sender: WeightSender | None = None

    @property
    def version(self) -> int:
        return self._version

    async def start(self) -> None:
        async with self._lock:
            if self._engine is not None:
                return
            if self._starting is None:
                self._starting = asyncio.ensure_future(
                    asyncio.to_thread(start_vllm, self._settings, self._shape, self._monitor)
                )
            # Not wait_for: a caller that gives up must not leave an engine behind that nobody can close.
            if not (await asyncio.wait((self._starting,), timeout=self._settings.start_seconds))[0]:
                raise BackendError(f"vLLM did not start within {self._settings.start_seconds:g} seconds")
            starting, self._starting = self._starting, None
            self._engine = await starting
            self._sender = WeightSender(
                self._engine,
                self._ask,
                num_ranks=self._settings.tensor_parallel,
                answer_seconds=self._settings.answer_seconds,
            )
            await self._sender.open()
            await self._ask(self._engine.update_weight_version(str(self._version)))

    async def generate(self, request: Request) -> Completion:
        self._check(request)
        await self.start()  # also waits for weights that are being loaded
        if self._refusal is not None:
            raise BackendError(self._refusal)
        if request.id in self._in_flight:
            raise TaskError(f"request {request.id} is already running")
        self._in_flight[request.id] = None
        try:
            with self._drawing.request():
                completion = await self._generate(request)
            finish = self._in_flight[request.id]
        except TemperError:
            raise
        except Exception as error:  # vLLM's own: its process died, or it has a bug
            raise self._failed(error) from error
        finally:
            del self._in_flight[request.id]
        if completion.finish is Finish.ABORT and finish is None:
            raise BackendError(self._refusal or f"vLLM dropped request {request.id}")
        return _ended(completion, finish) if completion.finish is Finish.ABORT else completion

    async def abort(self, request_id: str) -> None:
        await self._end(request_id, Finish.ABORT)

    async def interrupt(self, request_id: str) -> None:
        """Going on afterwards draws from the right distribution, but not the tokens that would have come: vLLM's
        random numbers start anew with each request."""
        await self._end(request_id, Finish.INTERRUPT)

    async def load(self, publication: Publication) -> None:
        """Manifest, tensors, acknowledgement; every parameter is read back from vLLM's model and compared.

        Old weights stay when the publication does not fit. When it fails later, requests in flight end with an error
        and nothing is drawn until a publication succeeds.
        """
        await self.start()
        async with self._lock:
            if self._is_asleep:
                raise BackendError(ASLEEP)
            assert self._sender is not None, "start() makes it"
            try:
                manifest = await self._sender.send(publication)
            except EngineLost:
                raise  # who is gone or silent has nothing to drop
            except BaseException:
                await self._sender.drop()
                raise
            await self._take_over(self._sender, manifest)

    def stats(self) -> Mapping[str, float]:
        seen, self._monitor.counts = self._monitor.counts, {}
        counts = {name: seen.get(name, 0.0) for name in COUNTERS}
        asked = counts["prefix_hit_tokens"] + counts["prefill_tokens"]
        rate = counts["prefix_hit_tokens"] / asked if asked else 0.0
        return counts | {"prefix_hit_rate": rate, "drawing_seconds": self._drawing.seconds()}

    async def warm_up(self, expected: ExpectedRequests, tell: Callable[[int, int], None]) -> None:
        """vLLM makes its recordings when it starts, for all sizes."""
        await self.start()
        tell(1, 1)

    def so_far(self, least: Mapping[str, int]) -> Mapping[str, Completion]:
        """Nothing: vLLM is asked for whole answers alone."""
        return {}

    async def digests(self) -> Mapping[str, str]:
        """Of what vLLM's model holds now (engine/digests.py), under the names of the last publication."""
        await self.start()
        assert self._sender is not None, "start() makes it"
        return await self._sender.digests()

    async def held(self, manifest: Manifest) -> Manifest:
        """What vLLM's model holds now, under the names of `manifest`."""
        await self.start()
        assert self._sender is not None, "start() makes it"
        return await self._sender.held(manifest)

    async def sleep(self, *, discard_weights: bool = False) -> None:
        """Gives GPU memory back. Requests in flight end with an error; none is taken until wake()."""
        if self._settings.device == "cpu" or not self._settings.can_sleep:
            raise UserError("vLLM can sleep on a GPU only, and only when made with can_sleep=True")
        await self.start()
        async with self._lock:
            self._refusal, self._is_asleep, self._has_weights = ASLEEP, True, not discard_weights
            await self._ask(self._engine.sleep(level=2 if discard_weights else 1, mode="abort"))

    async def wake(self) -> None:
        """After discarding, weights must be loaded before anything is drawn."""
        async with self._lock:
            await self._ask(self._engine.wake_up())
            self._is_asleep = False
            self._refusal = None if self._has_weights else "vLLM slept without its weights: load() them first"

    async def close(self) -> None:
        if self._starting is not None:
            await self.start()
        if self._engine is None:
            return
        self._refusal = "the engine is closed"
        await asyncio.wait_for(asyncio.to_thread(self._engine.shutdown, timeout=STOP_SECONDS), timeout=60.0)
        self._engine = None
        if self._sender is not None:
            self._sender.close()

    async def _take_over(self, sender: WeightSender, manifest: Manifest) -> None:
        engine = self._engine
        await self._ask(engine.pause_generation(mode="keep", clear_cache=False))
        self._refusal = f"weights of version {manifest.version} were taken over only in part: publish them again"
        try:
            await sender.commit(manifest)
            recompute = self._settings.kv_after_load == "recompute"
            is_reset = await self._ask(engine.reset_prefix_cache(reset_running_requests=recompute))
            # Blocks in use cannot be forgotten; new requests carry the new version as salt and never meet them.
            if not is_reset and (recompute or not self._in_flight):
                raise BackendError("vLLM would not forget the prefixes of the old weights")
            await self._ask(engine.update_weight_version(str(manifest.version)))
        except BaseException:
            await self._ask(engine.abort(list(self._in_flight)))
            raise
        finally:
            await self._ask(engine.resume_generation())
        self._refusal, self._has_weights, self._version = None, True, manifest.version

    async def _generate(self, request: Request) -> Completion:
        engine, processor = self._engine, self._engine.input_processor
        params = to_vllm(request.params, _seed_of(request, self._settings.seed), self._shape.vocab_size)
        prompt = {"type": "token", "prompt_token_ids": list(request.prompt_ids), "cache_salt": str(self._version)}
        tasks = await self._ask(engine.get_supported_tasks())
        try:
            made = processor.process_inputs(request.id, prompt, params, supported_tasks=tasks)
        except ValueError as error:
            raise TaskError(f"vLLM does not take request {request.id}: {error}") from error
        applied = read_back(request.params, made.sampling_params)
        queue = await self._ask(engine.add_request(request.id, made, made.sampling_params))
        try:
            if self._in_flight[request.id] is not None:  # ended before vLLM knew of it
                await self._ask(engine.abort(queue.request_id, internal=True))
            output = await self._delivered(queue)
        except asyncio.CancelledError:
            await self._ask(engine.abort(queue.request_id, internal=True))
            raise
        finally:
            queue.close()
        return to_completion(request, applied, output.outputs[0], self._settings.routes)

    async def _delivered(self, queue: Any) -> Any:
        """Waits for the end of a request, as long as the engine goes on making steps."""
        waiting = asyncio.ensure_future(queue.get())
        started, look_seconds = time.monotonic(), min(LOOK_SECONDS, self._settings.answer_seconds / 4)
        try:
            while not waiting.done():
                await asyncio.wait((waiting,), timeout=look_seconds)
                silent = time.monotonic() - max(started, self._monitor.last_step)
                if not waiting.done() and silent > self._settings.answer_seconds:
                    raise EngineLost(f"vLLM has made no step for {silent:.0f} seconds while requests wait")
            return await waiting
        finally:
            waiting.cancel()

    async def _end(self, request_id: str, finish: Finish) -> None:
        if request_id in self._in_flight and self._engine is not None:
            self._in_flight[request_id] = finish
            await self._ask(self._engine.abort(request_id))

    async def _ask(self, answer: Awaitable[Answer]) -> Answer:
        try:
            return await asyncio.wait_for(answer, self._settings.answer_seconds)
        except TimeoutError as error:
            raise EngineLost(f"vLLM did not answer within {self._settings.answer_seconds:g} seconds") from error
        except Exception as error:  # vLLM's own: a process of it died, or it has a bug
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> BackendError:
        engine, told = self._engine, f"vLLM failed: {error!r}"
        if engine is None:  # closed meanwhile
            return BackendError(self._refusal or told)
        return EngineLost(told) if engine.errored else BackendError(told)

    def _check(self, request: Request) -> None:
        length, longest = len(request.prompt_ids), self._settings.max_length
        if length == 0:
            raise TaskError("the prompt has no tokens")
        if length >= longest:
            raise ContextFull(
                f"the prompt has {length} tokens and the longest sequence is {longest}: no room to answer"
            )
        asked, vocabulary = request.params.top_logprobs, self._shape.vocab_size
        if not 0 <= asked <= vocabulary:
            raise TaskError(f"top_logprobs={asked}: the model has a vocabulary of {vocabulary}; use 0 to {vocabulary}")
        for name, ids in (("the prompt", request.prompt_ids), ("stop_ids", request.params.stop_ids)):
            if foreign := [token for token in ids if not 0 <= token < vocabulary]:  # vLLM would read its padding
                raise TaskError(f"{name} has ids outside of the vocabulary of {vocabulary}: {foreign[:3]}")
        require_supported(request.params)


def _seed_of(request: Request, seed: int) -> int:
    """Depends on the length of the prompt too: a request that goes on must not draw its first numbers again."""
    key = f"{seed}/{request.id}/{len(request.prompt_ids)}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1


def _ended(completion: Completion, finish: Finish | None) -> Completion:
    return completion if finish is None else replace(completion, finish=finish)
