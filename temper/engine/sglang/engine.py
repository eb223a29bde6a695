"""An SGLang server behind the Sampler seam: token ids in and out over its native HTTP interface.

Owns: requests under way, publication as a transaction, who may draw when. Refuses: starting servers, text, keep-sets.
Written against SGLang 0.5.23: srt/entrypoints/http_server.py, srt/managers/tokenizer_manager.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from temper.engine.fleet.member import SamplerLost
from temper.engine.in_flight import InFlight
from temper.engine.pieces import PiecedAnswer
from temper.engine.sglang.checkpoints import Checkpoints, PublishedCheckpoint
from temper.engine.sglang.client import FIRST_PAUSE_SECONDS, SglangClient, within
from temper.engine.sglang.probes import (
    probe_params,
    probe_prompt,
    refuse_logprobs,
    refuse_settings,
    refuse_truncation,
)
from temper.engine.sglang.streams import Active, RequestStreams
from temper.engine.sglang.weights import differing_rows, take_over, tells_rows
from temper.engine.sglang.wire import PartialCompletion, require_supported
from temper.engine.told_routes import ToldRoutes
from temper.errors import BackendError, ContextFull, TaskError
from temper.folders.integrity import refuse_code
from temper.types import Completion, Finish, Publication, Request, SamplingParams

END_SECONDS = 10.0
"""For a server to put itself in order, when it has failed or is not asked any more."""
UPDATE_SECONDS = 600.0
IDLE_SECONDS = 1800.0
STRANGER = "it was started anew, or someone else publishes to it"
NOT_FED = "no weights were published yet"
FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH}


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangSettings:
    seed: int = 0
    api_key: str = field(default="", repr=False)
    control_seconds: float = 60.0
    """Deadline of a call that changes no weights."""
    update_seconds: float = UPDATE_SECONDS
    """Deadline of one publication."""
    idle_seconds: float = IDLE_SECONDS
    """Longest wait between two events of a stream. In a full server a request may wait long for its turn."""
    start_seconds: float = 300.0
    """For a server to be there, at first and when it was lost."""
    routes: ToldRoutes | None = None
    """Of experts, told of every token. None: nobody asks."""


class SglangEngine:
    """Implements protocols.Sampler. Nothing is drawn before the first publication."""

    def __init__(self, address: str, settings: SglangSettings, checkpoints: Checkpoints) -> None:
        """address: http://HOST:PORT of a running server. checkpoints: may be those of several servers, and are closed
        by whoever made them."""
        self._settings, self._checkpoints = settings, checkpoints
        self._client = SglangClient(address, api_key=settings.api_key, idle_seconds=settings.idle_seconds)
        self.name = f"SGLang at {self._client.address}"
        self._version = 0
        self._weight_version = ""
        """The server's name for the weights in force; unique over runs, or an old run's weights could pass for ours.
        '' while it is unknown."""
        self._held: PublishedCheckpoint | None = None
        """What it took over last."""
        self._trouble = NOT_FED
        """Why nothing may be drawn; '' when all is well."""
        self._is_lost = False
        """Whether the trouble is that the server is lost."""
        self._active: dict[str, Active] = {}
        self._streams = RequestStreams(
            self._client, seed=settings.seed, control_seconds=settings.control_seconds, routes=settings.routes
        )
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
            model = await self._client.get("/model_info", seconds=seconds)
            refuse_settings(address, server, model, tells_routes=self._settings.routes is not None)
            # One that was lost while it took weights over may have stayed paused, and would swallow every request.
            await self._client.post("/continue_generation", {}, seconds=seconds)
            refuse_code(self._checkpoints.like)
            config = json.loads((self._checkpoints.like / "config.json").read_text())
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
        await self.check(self._settings.control_seconds)
        published, settings = await self._checkpoints.take(publication), self._settings
        async with self._publishing:
            self._trouble = f"publication {publication.version} did not complete"
            try:
                async with within(settings.update_seconds, f"{self.name} did not take over the weights"):
                    await self._publish(published)
            except BaseException as error:
                self._weight_version, self._is_lost = "", isinstance(error, SamplerLost)
                with contextlib.suppress(BackendError):
                    # A paused server would swallow every later request in silence; drawing is refused here instead.
                    await self._client.post("/continue_generation", {}, seconds=END_SECONDS)
                await self._checkpoints.give_back(published)
                reason = error if isinstance(error, BackendError) else repr(error)
                self._trouble = f"publication {publication.version} failed: {reason}"
                raise
            self._version, self._trouble, self._is_lost = publication.version, "", False
        previous, self._held = self._held, published
        if previous is not None:
            await self._checkpoints.give_back(previous)

    async def check(self, seconds: float) -> None:
        """Raises SamplerLost unless its scheduler answers and it has the weights that it was fed last. A server that
        was started anew has those that it was started with."""
        expected = self._weight_version
        await self._client.get("/server_info", seconds=seconds)
        told = (await self._client.get("/model_info", seconds=seconds)).get("weight_version")
        is_settled = expected == self._weight_version and not self._publishing.locked()
        if expected and told != expected and is_settled:
            raise SamplerLost(f"{self.name} serves {told!r} in place of {expected!r}: {STRANGER}")

    async def differences(self, seconds: float) -> list[str]:
        """Names of tensors that it holds with other numbers than were published. A server that hands out no tensors is
        not found out here."""
        held = self._held
        if held is None or not await tells_rows(self._client, held, seconds=seconds):
            return []
        return await differing_rows(self._client, held, seconds=seconds)

    def forget(self) -> None:
        """Nothing is drawn before the next publication."""
        self._trouble = NOT_FED

    def stats(self) -> Mapping[str, float]:
        """As counted from answers; the server's own KV use and steps are not among what it tells."""
        return self._streams.stats() | {"drawing_seconds": self._drawing.seconds()}

    async def close(self) -> None:
        """Whoever waits for an answer gets SamplerLost, with what was told of it."""
        self._is_lost, self._trouble = True, "it was closed"
        if self._active:
            with contextlib.suppress(BackendError):
                await self._streams.abort_all(END_SECONDS)
        await self._client.close()
        held, self._held = self._held, None
        if held is not None:
            await self._checkpoints.give_back(held)

    async def _complete(self, request: Request, active: Active) -> Completion:
        """One request to the server, or several when publications cut it: each is of one version."""
        pieces = PiecedAnswer(request, None)
        try:
            while True:
                expected, version = await self._admit(active)
                if active.wanted is not None:  # asked for while nothing of it was on the server
                    active.rid = ""
                    return pieces.ended(active.wanted)
                asked = pieces.rest()
                drawn = await self._streams.draw(asked, active)
                if told := _other_versions(drawn, expected):
                    raise SamplerLost(f"{self.name} drew by weights {told} in place of {expected!r}: {STRANGER}")
                finish = self._finish_of(drawn, active, asked.params)
                whole = pieces.add(drawn.completion(asked, version, finish or Finish.INTERRUPT))
                if drawn.lost is not None:
                    raise drawn.lost
                if finish is not None:
                    return whole
        except SamplerLost as error:
            raise SamplerLost(error.why, pieces.so_far) from error

    async def _admit(self, active: Active) -> tuple[str, int]:
        """Waits for a publication under way; the weights that will draw, by the server's name and by version."""
        seconds = self._settings.update_seconds + self._settings.control_seconds
        async with within(seconds, f"{self.name}: no publication ended"), self._publishing:
            if self._trouble:
                raise (SamplerLost if self._is_lost else BackendError)(f"{self.name} may not draw: {self._trouble}")
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
        if drawn.lost is not None:
            return None
        if self._is_lost:
            raise SamplerLost(f"{self.name} was closed")
        if not active.is_cut:
            raise BackendError(f"{self.name} aborted a request by itself: {reason.get('message')}")
        self._streams.counts["cuts"] += 1
        length = int(drawn.meta.get("prompt_tokens", 0)) + len(tokens)
        return Finish.LENGTH if len(tokens) >= left.max_new_tokens or length >= self._max_prompt else None

    async def _end(self, request_id: str, finish: Finish) -> None:
        active = self._active.get(request_id)
        if active is None:
            return
        active.wanted = finish
        if active.rid:
            await self._streams.abort(active.rid)

    async def _publish(self, published: PublishedCheckpoint) -> None:
        await self._cut_all()
        prompt, changed = self._probe_prompt(), _changed(self._held if self._weight_version else None, published)
        await self._probe(prompt)  # so that a prefix cache that outlives the update is found out below
        await take_over(
            self._client,
            published,
            changed=changed,
            seconds=self._settings.control_seconds,
            update_seconds=self._settings.update_seconds,
        )
        probe = await self._probe(prompt)
        if told := _other_versions(probe, published.folder.name):
            raise BackendError(
                f"{self.name} draws by weights {told} where {published.folder.name!r} were published: "
                "it did not take them over, or someone else publishes to this server"
            )
        if cached := int(probe.meta.get("cached_tokens") or 0):
            raise BackendError(
                f"{self.name} kept a stale prefix cache: {cached} tokens of a prompt were "
                f"answered from keys and values of the weights before {published.folder.name}"
            )
        self._weight_version = published.folder.name

    async def _cut_all(self) -> None:
        """Ends every request on the server; their generate() calls wait for the publication and go on. Asks again until
        all have ended: an abort that arrives before its request is lost."""
        pause, seconds = FIRST_PAUSE_SECONDS, self._settings.control_seconds
        async with within(seconds, f"{self.name} did not end the requests under way"):
            while busy := [active for active in self._active.values() if active.rid]:
                for active in busy:
                    active.is_cut = True
                await self._streams.abort_all(seconds)
                await asyncio.sleep(pause)
                pause = min(2 * pause, 1.0)

    def _probe_prompt(self) -> tuple[int, ...]:
        length = min(max(8, 2 * self._page_size + 2), self._max_prompt - 2)
        return probe_prompt(self._vocabulary, length, seed=self._settings.seed)

    async def _probe(self, prompt: tuple[int, ...], params: SamplingParams | None = None) -> PartialCompletion:
        active = Active(rid=uuid.uuid4().hex)
        params = params or SamplingParams(temperature=0.0, max_new_tokens=1)
        async with within(self._settings.control_seconds, f"{self.name} did not answer a probe"):
            drawn = await self._streams.draw(Request(id="probe", prompt_ids=prompt, params=params), active)
        if drawn.lost is not None:
            raise drawn.lost
        return drawn


def _other_versions(drawn: PartialCompletion, expected: str) -> str:
    """Names of weights other than these by which it was drawn; '' for none."""
    spans = [span["version"] for span in drawn.meta.get("weight_versions") or []]
    return ", ".join(map(repr, {*spans, drawn.meta.get("weight_version")} - {expected}))


def _check_length(request: Request, max_prompt: int) -> None:
    length = len(request.prompt_ids)
    if length == 0:
        raise TaskError("the prompt has no tokens")
    if length >= max_prompt:
        raise ContextFull(f"the prompt has {length} tokens and the server takes fewer than {max_prompt}")


def _changed(previous: PublishedCheckpoint | None, published: PublishedCheckpoint) -> set[str] | None:
    """None: what the server has is unknown."""
    if previous is None:
        return None
    before = previous.manifest.tensors
    return {name for name, facts in published.manifest.tensors.items() if before.get(name) != facts}
