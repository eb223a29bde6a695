"""Where agents ask while they are trained, and environments that ask the policy: one address, a key for each episode.

Owns: the server, which episode a key stands for, and what of OpenAI's interface means something else in training.
Refuses: drawing and limits (rollout/agents.py), starting agents (envs/agents/), whoever has no key of an episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from temper.asking.quoting import quote
from temper.envs.agents.agent import RESULT_PATH, read_result
from temper.envs.agents.allowance import LimitReached
from temper.envs.agents.launch import MODEL_SOCKET
from temper.errors import BackendError, ContextFull, TaskError, UserError, install_line
from temper.listening import listen, listen_at, make_server, own_names
from temper.rollout.agents import DrawnCall, EpisodeCalls, Posted
from temper.serve.app import App, HttpClient, HttpSettings, Receive, Send
from temper.serve.asked import ChatRequest
from temper.serve.conversation import Conversations
from temper.serve.gateway import Gateway, text_thread
from temper.serve.orders import ServerLimits
from temper.serve.records import Entry, Parent, Records
from temper.serve.refusals import CONTEXT_FULL, Refused
from temper.types import Completion, Request

SESSION = "episode"
Heard = Callable[[str, int, bytes], object]
"""Is told of each request that was answered: its path, the status and the body."""
MAX_AT_ONCE = 64
"""Completions of one episode under way at the same time."""
SHUTDOWN_SECONDS = 5.0
LOOK_SECONDS = 0.01
START_SECONDS = 30.0


class EpisodeEngine:
    """Implements gateway.Engine for one episode. Weights may change between two tokens; versions tell."""

    def __init__(self, calls: EpisodeCalls) -> None:
        self._calls = calls

    @property
    def version(self) -> int:
        return self._calls.version

    async def generate(
        self, request: Request, *, watch: Callable[[list[int], list[float]], None] | None = None
    ) -> Completion:
        """`watch` hears nothing: samplers in other processes tell a completion when it is whole."""
        return await self._calls.draw(request)

    async def abort(self, request_id: str) -> None:
        await self._calls.abort(request_id)

    def utilisation(self) -> Mapping[str, float]:
        return {}


class AsTrained:
    """Implements orders.Ordering: what the recipe draws, at most as much of it as the agent wants.

    An agent's temperature, top_p, top_k, min_p and seed have no effect: what is trained is what the recipe samples.
    """

    def __init__(self, calls: EpisodeCalls, max_length: int) -> None:
        self._calls, self._max_length = calls, max_length

    async def order(self, name: str, prompts: Sequence[tuple[int, ...]], asked: ChatRequest) -> list[Request]:
        if asked.params.top_logprobs:
            raise Refused("top_logprobs is not available in training", param="top_logprobs", code="unsupported_value")
        rooms = [self._max_length - len(prompt_ids) for prompt_ids in prompts]
        if min(rooms) < 1:
            longest_prompt = max(map(len, prompts))
            problem = f"the prompt has {longest_prompt} tokens, and the context has {self._max_length}"
            self._calls.full = ContextFull(problem)
            raise Refused(problem, param=asked.prompt_name, code=CONTEXT_FULL)
        longest = [min(asked.params.max_new_tokens or room, room) for room in rooms]
        try:
            return await self._calls.order(prompts, longest, asked.params.stop)
        except LimitReached as problem:
            # Not 429, after which clients wait and ask again.
            raise Refused(str(problem), status=403, code="episode_limit") from problem

    def give_back(self, request: Request) -> None:
        self._calls.give_back(request)


@dataclass(frozen=True, slots=True)
class _Kept:
    text: str
    """Prompt and answer, special tokens included."""
    entry: Entry


class EpisodeRecords:
    """Implements records.Records for one episode, in memory."""

    def __init__(self, calls: EpisodeCalls) -> None:
        self._calls = calls
        self._kept: list[_Kept] = []

    def add(self, entry: Entry) -> int:
        self._kept.append(_Kept(entry.origin.text + entry.drawn_text, entry))
        self._calls.add(DrawnCall(completion=entry.completion, text=entry.reply, messages=entry.origin.messages))
        return len(self._kept)

    def said(self, session: str, keys: Sequence[str]) -> Mapping[str, str]:
        found = {str(kept.entry.reply_key): kept.entry.said for kept in self._kept}
        return {key: found[key] for key in keys if key in found}

    def parent_of(self, session: str, text: str) -> Parent | None:
        fitting = [(len(kept.text), place) for place, kept in enumerate(self._kept) if text.startswith(kept.text)]
        if not fitting:
            return None
        length, place = max(fitting)
        entry = self._kept[place].entry
        ids = (*entry.completion.prompt_ids, *entry.completion.token_ids)
        num_messages = entry.origin.num_messages and entry.origin.num_messages + 1
        return Parent(row=place + 1, ids=ids, text_length=length, num_messages=num_messages)

    def close(self) -> None:
        """Nothing is held open."""


def _no_episode() -> Refused:
    return Refused("this key belongs to no running episode", status=401, code="invalid_api_key")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _overheard(send: Send, heard: Callable[[int, bytes], object]) -> Send:
    """Sends the same, and tells the status and the whole body of the answer."""
    status, body = 0, b""

    async def deliver(message: MutableMapping[str, Any]) -> None:
        nonlocal status, body
        await send(message)
        status = message.get("status", status)
        body += message.get("body", b"")
        if message["type"] == "http.response.body" and not message.get("more_body"):
            heard(status, body)

    return deliver


class AgentEndpoint:
    """Implements rollout.agents.AgentDoor and the ASGI interface. Lives in the event loop of the run."""

    def __init__(
        self,
        converse: Callable[[Records], Conversations],
        place: tuple[str, int],
        *,
        model: str,
        max_length: int,
        address: str = "",
        has_socket: bool = False,
        heard: Heard | None = None,
    ) -> None:
        """converse: how the model talks, with what was said before in one episode. place: host and port where it
        listens from the first episode on; port 0: any that is free. address: the same as agents are told it; empty: as
        it is bound. has_socket: agents behind a wall ask through a socket in the file system. heard: None: nobody wants
        to know."""
        self._converse = converse
        self._heard = heard
        self._place = place
        self._address = address
        self._hosts: frozenset[str] | None = frozenset()
        self._bound: list[socket.socket] = []
        self._model = model
        self._max_length = max_length
        self._gateways: dict[str, tuple[Gateway, App, EpisodeCalls]] = {}
        self._worker = text_thread()
        self._lock = asyncio.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="temper-model-") if has_socket else None
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None

    async def open(self, calls: EpisodeCalls, posted: Posted | None = None) -> tuple[str, Mapping[str, str]]:
        await self._start()
        key = f"temper-{secrets.token_urlsafe(24)}"
        records = EpisodeRecords(calls)
        limits = ServerLimits(
            model=self._model, stop_ids=calls.stop_ids, max_length=self._max_length, max_in_flight=MAX_AT_ONCE
        )
        gateway = Gateway(
            EpisodeEngine(calls),
            self._converse(records),
            records,
            limits,
            ordering=AsTrained(calls, self._max_length),
            worker=self._worker,
        )
        settings = HttpSettings(api_key=key, hosts=self._hosts, session=SESSION)
        routes = {} if posted is None else {f"/v1{RESULT_PATH}": partial(self._take_result, key, posted)}
        self._gateways[key] = (gateway, App(gateway, settings, routes), calls)
        model = self._model or "policy"
        variables = {"OPENAI_BASE_URL": f"{self._address}/v1", "OPENAI_API_KEY": key, "OPENAI_MODEL": model}
        if self._folder is not None:
            variables[MODEL_SOCKET] = self._socket_path()
        return key, variables

    async def shut(self, key: str) -> None:
        gateway, _, calls = self._gateways.pop(key)
        calls.end()
        await gateway.end()

    async def close(self) -> None:
        if self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait((self._serving,), timeout=2 * SHUTDOWN_SECONDS)
            self._serving.cancel()
        for bound in self._bound:
            bound.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._worker.shutdown(wait=False, cancel_futures=True)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if self._heard is not None:
            send = _overheard(send, partial(self._heard, scope["path"]))
        kind, _, key = dict(scope.get("headers", ())).get(b"authorization", b"").partition(b" ")
        found = self._gateways.get(key.strip().decode("latin-1")) if kind.lower() == b"bearer" else None
        if found is not None:
            return await found[1](scope, receive, send)
        await HttpClient(scope, receive, send, HttpSettings()).refuse(_no_episode())

    async def _take_result(self, key: str, posted: Posted, client: HttpClient) -> None:
        """The first one counts. One that cannot be read is the end of its episode: nobody knows what it would say."""
        try:
            found: str | TaskError | Refused = read_result(await client.body())
        except (Refused, TaskError) as problem:
            found = problem
        if key not in self._gateways:  # the episode has ended since the head of the request came
            raise _no_episode()
        is_first = not posted.done()
        if is_first:
            posted.set_result(TaskError(str(found)) if isinstance(found, Exception) else found)
        if isinstance(found, Refused):
            raise found
        if isinstance(found, TaskError):
            raise Refused(quote(str(found), (key,), 200))
        if not is_first:
            raise Refused("this episode has its result: the first one counts", status=409, code="result_given")
        await client.send_json(200, {"status": "taken"})

    def _socket_path(self) -> str:
        assert self._folder is not None, "only agents behind a wall have it"
        return os.path.join(self._folder.name, "socket")

    def _bind(self) -> None:
        """Not before there is an episode: an endpoint that nobody asks leaves the port to others."""
        try:
            bound = listen(*self._place)
        except UserError as error:  # of the run: another episode would not find it either
            raise BackendError(f"agents would not find the model: {error}") from error
        self._bound = [bound, *([listen_at(self._socket_path())] if self._folder is not None else [])]
        host, port = bound.getsockname()[:2]
        self._address = self._address or f"http://{_bracketed(host)}:{port}"
        own = own_names(host)
        # A tunnel may lead here, and its other end has a name of its own.
        self._hosts = own and own | {_bracketed(urlsplit(self._address).hostname or host)}

    async def _start(self) -> None:
        """With the first episode."""
        async with self._lock:
            if self._serving is None:
                missing = f"the policy's endpoint needs uvicorn. Run: {install_line('serve')}"
                self._server = make_server(self, shutdown_seconds=SHUTDOWN_SECONDS, missing=missing)
                # By itself it would take over Ctrl-C and SIGTERM, which are the run's.
                self._server.capture_signals = contextlib.nullcontext
                self._bind()
                self._serving = asyncio.create_task(self._server.serve(sockets=self._bound), name="agents' endpoint")
                async with asyncio.timeout(START_SECONDS):
                    while not self._server.started and not self._serving.done():
                        await asyncio.sleep(LOOK_SECONDS)
            if self._serving.done():
                raise BackendError("the server that agents ask has ended")
