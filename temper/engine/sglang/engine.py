"""An SGLang server behind the Sampler seam: token ids in and out over its native HTTP interface.

Owns: requests under way, publication as a transaction, who may draw when. Refuses: starting servers, text, keep-sets.
Written against SGLang 0.5.23: srt/entrypoints/http_server.py, srt/managers/tokenizer_manager.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import shutil
import uuid
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from temper.engine.in_flight import InFlight
from temper.engine.manifest import Manifest, manifest_of
from temper.engine.sglang.client import FIRST_PAUSE_SECONDS, SglangClient, within
from temper.engine.sglang.probes import (
    probe_params,
    probe_prompt,
    refuse_logprobs,
    refuse_settings,
    refuse_truncation,
)
from temper.engine.sglang.weights import take_over, write_checkpoint
from temper.engine.sglang.wire import PartialCompletion, body_of, check_drawn, require_supported
from temper.errors import BackendError, ContextFull, TaskError
from temper.folders.integrity import refuse_code
from temper.types import Completion, Finish, Publication, Request, SamplingParams

FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SglangSettings:
    address: str
    """http://HOST:PORT of a running server."""
    checkpoint: Path
    """The Hugging Face directory the server was started from: published ones get its configuration and tokenizer."""
    weights_folder: Path
    """Publications are written here; the server must see it under the same path."""
    seed: int = 0
    api_key: str = ""
    control_seconds: float = 60.0
    """Deadline of a call that changes no weights."""
    update_seconds: float = 600.0
    """Deadline of one publication."""
    idle_seconds: float = 300.0
    """Longest wait between two events of a stream."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Active:
    """A generate() under way, over all the requests that it takes."""

    rid: str = ""
    """Id of the request on the server now; '' for none. All ids have one length: the server aborts by prefix."""
    wanted: Finish | None = None
    """How its caller wants it to end."""
    is_cut: bool = False
    """Whether a publication ends the current request; another one then goes on under the new weights."""


class SglangEngine:
    """Implements protocols.Sampler. Nothing is drawn before the first publication."""

    def __init__(self, settings: SglangSettings, *, version: int = 0) -> None:
        self._settings = settings
        self._client = SglangClient(settings.address, api_key=settings.api_key, idle_seconds=settings.idle_seconds)
        self._who = f"SGLang at {self._client.address}"
        self._version = version
        self._weight_version = ""
        """The server's name for the weights in force; unique over runs, or an old run's weights could pass for ours."""
        self._manifest: Manifest | None = None
        self._folder: Path | None = None
        self._trouble = "no weights were published yet"
        """Why nothing may be drawn; '' when all is well."""
        self._active: dict[str, Active] = {}
        self._counts: Counter[str] = Counter()
        self._drawing = InFlight()
        self._starting, self._publishing = asyncio.Lock(), asyncio.Lock()
        self._is_started = False
        self._vocabulary = self._max_prompt = self._page_size = 0

    @property
    def version(self) -> int:
        return self._version

    async def start(self) -> None:
        """Looks at the server and refuses one whose log-probabilities would not be what the trainer needs."""
        async with self._starting:
            if self._is_started:
                return
            seconds, address = self._settings.control_seconds, self._client.address
            server = await self._client.get("/server_info", seconds=seconds)
            refuse_settings(address, server, await self._client.get("/model_info", seconds=seconds))
            refuse_code(self._settings.checkpoint)
            config = json.loads((self._settings.checkpoint / "config.json").read_text())
            self._vocabulary = int(config.get("text_config", config)["vocab_size"])
            self._max_prompt = int(server.get("max_req_input_len") or server.get("context_length") or 0)
            self._page_size = int(server.get("page_size") or 1)
            prompt = self._probe_prompt()
            plain, hot = [await self._probe(prompt, params) for params in probe_params(self._vocabulary)]
            refuse_logprobs(address, plain, hot)
            refuse_truncation(address, hot)
            self._is_started = True

    async def generate(self, request: Request) -> Completion:
        require_supported(request.params)
        await self.start()
        _check_length(request, self._max_prompt)
        if request.id in self._active:
            raise TaskError(f'request "{request.id}" is under way already')
        active = self._active[request.id] = Active()
        try:
            with self._drawing.request():
                return await self._complete(request, active)
        finally:
            del self._active[request.id]

    async def abort(self, request_id: str) -> None:
        await self._end(request_id, Finish.ABORT)

    async def interrupt(self, request_id: str) -> None:
        await self._end(request_id, Finish.INTERRUPT)

    async def load(self, publication: Publication) -> None:
        """A transaction: written aside, every request cut, updated, acknowledged, read back, tried. What fails while
        it is written changes nothing; what fails later stops all drawing until a publication succeeds."""
        await self.start()
        manifest = await asyncio.to_thread(manifest_of, publication)
        settings = self._settings
        folder = await asyncio.to_thread(
            write_checkpoint, publication, manifest, like=settings.checkpoint, folder=settings.weights_folder
        )
        async with self._publishing:
            self._trouble = f"publication {publication.version} did not complete"
            try:
                async with within(settings.update_seconds, f"{self._who} did not take over the weights"):
                    await self._publish(publication, manifest, folder)
            except BaseException as error:
                with contextlib.suppress(BackendError):
                    # A paused server would swallow every later request in silence; drawing is refused here instead.
                    await self._client.post("/continue_generation", {}, seconds=settings.control_seconds)
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
                reason = error if isinstance(error, BackendError) else repr(error)
                self._trouble = f"publication {publication.version} failed: {reason}"
                raise
            self._version, self._manifest, self._trouble = publication.version, manifest, ""
        previous, self._folder = self._folder, folder
        if previous is not None and previous != folder:
            await asyncio.to_thread(shutil.rmtree, previous, ignore_errors=True)

    def stats(self) -> Mapping[str, float]:
        """As counted from answers; the server's own KV use and steps are not among what it tells."""
        names = ("prefill_tokens", "cached_tokens", "decode_tokens", "requests", "preemptions", "cuts")
        counts = {name: float(self._counts[name]) for name in names}
        self._counts.clear()
        asked = counts["cached_tokens"] + counts["prefill_tokens"]
        rate = counts["cached_tokens"] / asked if asked else 0.0
        return counts | {"prefix_hit_rate": rate, "drawing_seconds": self._drawing.seconds()}

    async def close(self) -> None:
        for request_id in list(self._active):
            with contextlib.suppress(BackendError):
                await self.abort(request_id)
        await self._client.close()
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _complete(self, request: Request, active: Active) -> Completion:
        """One request to the server, or several when publications cut it: each is of one version."""
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        top: list[list[tuple[int, float]]] = []
        finish = None
        while finish is None:
            expected, version = await self._admit(active)
            if active.wanted is not None:  # asked for while nothing of it was on the server
                active.rid, finish = "", active.wanted
                break
            left = dataclasses.replace(request.params, max_new_tokens=request.params.max_new_tokens - len(tokens))
            drawn = await self._draw(request.id, active, (*request.prompt_ids, *tokens), left)
            _require_version(self._who, drawn, expected)
            tokens += drawn.token_ids
            logprobs += drawn.logprobs
            versions += [version] * len(drawn.token_ids)
            top += drawn.top
            finish = self._finish_of(drawn, active, left)
        asked = request.params.top_logprobs > 0
        return Completion(
            prompt_ids=request.prompt_ids,
            token_ids=tokens,
            logprobs=logprobs,
            versions=versions,
            finish=finish,
            top_ids=[[token for token, _ in row] for row in top] if asked else None,
            top_logprobs=[[value for _, value in row] for row in top] if asked else None,
            params=request.params,
        )

    async def _admit(self, active: Active) -> tuple[str, int]:
        """Waits for a publication under way; the weights that will draw, by the server's name and by version."""
        seconds = self._settings.update_seconds + self._settings.control_seconds
        async with within(seconds, f"{self._who}: no publication ended"), self._publishing:
            if self._trouble:
                raise BackendError(f"{self._who} may not draw: {self._trouble}")
            active.rid, active.is_cut = uuid.uuid4().hex, False
            return self._weight_version, self._version

    def _finish_of(self, drawn: PartialCompletion, active: Active, left: SamplingParams) -> Finish | None:
        """None: cut by a publication, to be gone on with."""
        reason, tokens = drawn.finish_reason or {}, drawn.token_ids
        if (finish := FINISHES.get(str(reason.get("type")))) is not None:
            return finish
        # An abort hides what the token of the same step meant.
        if tokens and tokens[-1] in left.stop_ids:
            return Finish.STOP
        if active.wanted is not None:
            return active.wanted
        if not active.is_cut:
            raise BackendError(f"{self._who} aborted a request by itself: {reason.get('message')}")
        self._counts["cuts"] += 1
        length = int(drawn.meta.get("prompt_tokens", 0)) + len(tokens)
        return Finish.LENGTH if len(tokens) >= left.max_new_tokens or length >= self._max_prompt else None

    async def _draw(
        self, request_id: str, active: Active, prompt_ids: tuple[int, ...], params: SamplingParams
    ) -> PartialCompletion:
        rid, drawn = active.rid, PartialCompletion()
        body = body_of(rid=rid, prompt_ids=prompt_ids, params=params, seed=self._settings.seed, request_id=request_id)
        try:
            async with contextlib.aclosing(self._client.stream("/generate", body)) as events:
                async for event in events:
                    drawn.add(event)
                    # An abort that came before the server knew the request was ignored there, so it is repeated.
                    if drawn.finish_reason is None and (active.is_cut or active.wanted is not None):
                        await self._abort_on_server(rid)
        except asyncio.CancelledError:
            with contextlib.suppress(BackendError):
                await asyncio.shield(self._abort_on_server(rid))
            raise
        finally:
            active.rid = ""
        check_drawn(drawn, rid=rid, prompt_ids=prompt_ids, params=params)
        self._count(drawn)
        return drawn

    def _count(self, drawn: PartialCompletion) -> None:
        cached = int(drawn.meta.get("cached_tokens") or 0)
        self._counts["requests"] += 1
        self._counts["cached_tokens"] += cached
        self._counts["prefill_tokens"] += int(drawn.meta.get("prompt_tokens") or 0) - cached
        self._counts["decode_tokens"] += len(drawn.token_ids)
        self._counts["preemptions"] += int(drawn.meta.get("num_retractions") or 0)

    async def _end(self, request_id: str, finish: Finish) -> None:
        active = self._active.get(request_id)
        if active is None:
            return
        active.wanted = finish
        if active.rid:
            await self._abort_on_server(active.rid)

    async def _abort_on_server(self, rid: str) -> None:
        await self._client.post("/abort_request", {"rid": rid}, seconds=self._settings.control_seconds)

    async def _publish(self, publication: Publication, manifest: Manifest, folder: Path) -> None:
        await self._cut_all()
        prompt, changed = self._probe_prompt(), _changed(self._manifest, manifest)
        await self._probe(prompt)  # so that a prefix cache that outlives the update is found out below
        await take_over(
            self._client,
            publication,
            folder,
            changed=changed,
            seconds=self._settings.control_seconds,
            update_seconds=self._settings.update_seconds,
        )
        probe = await self._probe(prompt)
        _require_version(self._who, probe, folder.name)
        if cached := int(probe.meta.get("cached_tokens") or 0):
            raise BackendError(
                f"{self._who} kept a stale prefix cache: {cached} tokens of a prompt were "
                f"answered from keys and values of the weights before {folder.name}"
            )
        self._weight_version = folder.name

    async def _cut_all(self) -> None:
        """Ends every request on the server; their generate() calls wait for the publication and go on. Asks again until
        all have ended: an abort that arrives before its request is lost."""
        pause, seconds = FIRST_PAUSE_SECONDS, self._settings.control_seconds
        async with within(seconds, f"{self._who} did not end the requests under way"):
            while busy := [active for active in self._active.values() if active.rid]:
                for active in busy:
                    active.is_cut = True
                await self._client.post("/abort_request", {"abort_all": True}, seconds=seconds)
                await asyncio.sleep(pause)
                pause = min(2 * pause, 1.0)

    def _probe_prompt(self) -> tuple[int, ...]:
        length = min(max(8, 2 * self._page_size + 2), self._max_prompt - 2)
        return probe_prompt(self._vocabulary, length, seed=self._settings.seed)

    async def _probe(self, prompt: tuple[int, ...], params: SamplingParams | None = None) -> PartialCompletion:
        active = Active(rid=uuid.uuid4().hex)
        params = params or SamplingParams(temperature=0.0, max_new_tokens=1)
        async with within(self._settings.control_seconds, f"{self._who} did not answer a probe"):
            return await self._draw("probe", active, prompt, params)


def _require_version(who: str, drawn: PartialCompletion, expected: str) -> None:
    spans = [span["version"] for span in drawn.meta.get("weight_versions") or []]
    if told := {*spans, drawn.meta.get("weight_version")} - {expected}:
        raise BackendError(
            f"{who} drew by weights {', '.join(map(repr, told))} where {expected!r} were published: "
            "someone else publishes to this server, or it did not take over the last publication"
        )


def _check_length(request: Request, max_prompt: int) -> None:
    length = len(request.prompt_ids)
    if length == 0:
        raise TaskError("the prompt has no tokens")
    if length >= max_prompt:
        raise ContextFull(f"the prompt has {length} tokens and the server takes fewer than {max_prompt}")


def _changed(previous: Manifest | None, manifest: Manifest) -> set[str] | None:
    if previous is None:
        return None
    return {name for name, facts in manifest.tensors.items() if previous.tensors.get(name) != facts}
