"""Models that a verifiers environment asks by itself: judges in rubrics, users that a model plays.

Owns: who answers them, limits of an episode, what is kept of the answers, taking over what OpenAI's client is asked.
Refuses: HTTP (asking/endpoint.py), streams, and anything but chat completions.

OpenAI's client is patched, once (checked with openai 3.51): environments make their clients themselves, keep them in
closures and make new ones, and only their class sees all of them. Outside of episodes it is as it was.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import functools
import importlib
import json
import time
from collections.abc import Awaitable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from temper.asking.endpoint import Endpoint, EndpointOptions, Reply, read_reply
from temper.errors import TaskError, UserError, did_you_mean, nearest_file
from temper.plugins import require_options
from temper.types import Event, EventKind, Scalar

Result = TypeVar("Result")

POLICY = "policy"
PREFIX = "judge_"
QUESTION_CHARACTERS, ANSWER_CHARACTERS = 1_000, 4_000
"""Most that is kept of each."""
WAIT_SECONDS = 600.0
"""For an answer to a client without asyncio. The deadlines of the endpoint and of the step come before."""
NOWHERE = "http://judge.invalid/v1"
UNSERVED = (
    "this environment asks a model by itself. Say who answers, in the options of env or reward: "
    'judge = "http://127.0.0.1:8000/v1" and judge_model = "name", or judge = "policy" (docs/adapters.md)'
)
_ASKING: contextvars.ContextVar[ModelCalls | None] = contextvars.ContextVar("verifiers_asking", default=None)
"""Whose calls they are; in an episode's thread, and in whatever it starts with its context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskLimits:
    """What an episode may ask. Each is an option of a recipe, with judge_ before its name."""

    max_calls: int = 16
    """Questions of an episode."""
    max_tokens: int = 512
    """Tokens of an answer, unless the environment asks for fewer."""
    max_episode_tokens: int = 8192
    """Tokens of all answers of an episode."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) < 1:
                raise UserError(f"{PREFIX}{field.name}={value} must be at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judging:
    """Who answers an environment, and how often."""

    limits: AskLimits
    endpoint: EndpointOptions | None = None
    """None: the run itself answers."""
    folder: str = ""
    """Directory of the model that answers; empty, without an endpoint: the policy does."""


def read_judging(where: str, judge: str, options: Mapping[str, Scalar]) -> Judging | None:
    """What a recipe says: judge, and options with judge_ before their names. None: nobody answers."""
    given = {name.removeprefix(PREFIX): value for name, value in options.items()}
    limits, asked = ({field.name for field in dataclasses.fields(kind)} for kind in (AskLimits, EndpointOptions))
    known = [f"{PREFIX}{name}" for name in sorted((limits | asked) - {"base_url"})]
    for name in options:
        if name not in known:
            raise UserError(f'{where}: option "{name}" is unknown.{did_you_mean(name, known)}')
    if not judge and given:
        raise UserError(f'{where}: {PREFIX}{next(iter(given))} needs judge: an address, a directory, or "{POLICY}".')
    if not judge:
        return None
    own = {name: value for name, value in given.items() if name in limits}
    require_options(AskLimits, own, where=where)
    bounds = AskLimits(**own)  # type: ignore[arg-type]  # checked above
    if is_address(judge):
        return Judging(limits=bounds, endpoint=_read_address(where, judge, given, asked))
    if idle := sorted(set(given) - limits):
        raise UserError(f'{where}: {PREFIX}{idle[0]} would change nothing where judge = "{judge}". Remove it.')
    if judge != POLICY and not Path(judge).expanduser().is_dir():
        raise UserError(
            f'{where}: judge="{judge}" is neither an address ("http://..."), nor "{POLICY}", nor the directory of a '
            f"model.{nearest_file(Path(judge))}"
        )
    return Judging(limits=bounds, folder="" if judge == POLICY else judge)


def is_address(judge: str) -> bool:
    return judge.startswith(("http://", "https://"))


def _read_address(where: str, judge: str, given: Mapping[str, Scalar], known: set[str]) -> EndpointOptions:
    address: dict[str, Any] = {"base_url": judge, **{name: given[name] for name in given if name in known}}
    if "model" not in address:
        raise UserError(f"{where}: {PREFIX}model is missing. Name the model that {judge} serves.")
    require_options(EndpointOptions, address, where=where)
    return EndpointOptions(**address)


@functools.lru_cache(maxsize=16)
def shared_endpoint(options: EndpointOptions) -> Endpoint:
    """One for all episodes: its bound on requests under way is the run's."""
    return Endpoint(options)


class ModelCalls:
    """What one episode asks of models. A call that fails is the end of the episode, whatever is made of it there.

    Everything but ask() and ask_blocking() belongs to the event loop it was made in, the run's.
    """

    def __init__(self, limits: AskLimits, endpoint: Endpoint | None, unserved: str = UNSERVED) -> None:
        """endpoint: None where nobody answers; `unserved` is then said to whoever asks."""
        self._limits = limits
        self._endpoint = endpoint
        self._unserved = unserved
        self._loop = asyncio.get_running_loop()
        self._kept: list[Event] = []
        self._num_calls = 0
        self._tokens_left = limits.max_episode_tokens
        self._failure = self._last = ""

    async def ask(self, path: str, body: bytes) -> bytes:
        """The answer to a request of OpenAI's client, from any event loop."""
        try:
            return await asyncio.wrap_future(self._begin(path, body))
        except asyncio.CancelledError:  # a deadline of the environment's own; noted before it can make a number of it
            self._failure = self._failure or "the environment's judge failed: it was not waited for to the end"
            raise

    def ask_blocking(self, path: str, body: bytes) -> bytes:
        """The same from a thread without one."""
        return self._begin(path, body).result(timeout=WAIT_SECONDS)

    def _begin(self, path: str, body: bytes) -> Future[bytes]:
        answer = self._answer(path, body)
        try:
            return asyncio.run_coroutine_threadsafe(answer, self._loop)
        except RuntimeError:  # the run has ended, and the thread of an episode that was given up has not heard of it
            answer.close()
            raise

    def take(self) -> tuple[Event, ...]:
        """What was answered since the last time."""
        kept, self._kept = tuple(self._kept), []
        return kept

    async def during(self, work: Awaitable[Result]) -> Result:
        """What comes of it, unless a model failed on the way: that is then raised instead."""
        try:
            result = await work
        except TaskError as error:
            self._require_answers(error)
            raise
        self._require_answers(None)
        return result

    def _require_answers(self, cause: TaskError | None) -> None:
        if self._failure:
            before = f". Before that, {self._last}" if self._last else ""
            raise TaskError(f"{self._failure}{before}") from cause

    async def _answer(self, path: str, body: bytes) -> bytes:
        if self._failure:  # a rubric that goes on asking must not wait for another deadline
            raise TaskError(self._failure)
        try:
            return await self._complete(path, body)
        except Exception as error:  # the rim: reward functions turn exceptions into numbers
            self._failure = str(error) if self._endpoint is None else f"the environment's judge failed: {error}"
            raise

    async def _complete(self, path: str, body: bytes) -> bytes:
        if self._endpoint is None:
            raise TaskError(self._unserved)
        if not path.endswith("/chat/completions"):
            raise TaskError(f"{path} was asked for, and only chat completions are answered")
        question: dict[str, Any] = json.loads(body)
        if question.get("stream"):
            raise TaskError("a stream was asked for, and only whole answers are given")
        self._num_calls += 1
        if self._num_calls > self._limits.max_calls:
            raise TaskError(f"the episode asked more than {PREFIX}max_calls={self._limits.max_calls} times")
        allowed = self._reserve(question)
        started = time.monotonic()
        answer = await self._endpoint.complete(json.dumps(question).encode())
        used = _tokens_of(answer)
        self._tokens_left += allowed - (allowed if used is None else used)
        self._keep(question, read_reply(answer), time.monotonic() - started)
        return answer

    def _keep(self, question: Mapping[str, Any], reply: Reply, seconds: float) -> None:
        asked = _short(_last_message(question), QUESTION_CHARACTERS)
        self._last = f"asked: {asked}\nanswered: {_short(reply.text, ANSWER_CHARACTERS)}"
        self._kept.append(Event(kind=EventKind.MODEL_CALL, name=reply.model, detail=self._last, seconds=seconds))

    def _reserve(self, question: dict[str, Any]) -> int:
        """Writes model and limits into the question. Tokens that it may cost are taken before it is asked: questions
        side by side share what is left."""
        assert self._endpoint is not None, "somebody answers"
        choices = max(1, int(question.get("n") or 1))
        name = "max_completion_tokens" if question.get("max_completion_tokens") else "max_tokens"
        wanted = min(int(question.get(name) or self._limits.max_tokens), self._limits.max_tokens)
        longest = min(wanted, self._tokens_left // choices)
        if longest < 1:
            raise TaskError(f"the episode's answers have {PREFIX}max_episode_tokens={self._limits.max_episode_tokens}")
        question |= {"model": self._endpoint.options.model, name: longest}
        self._tokens_left -= longest * choices
        return longest * choices


def take_over(calls: ModelCalls) -> None:
    """From now on whatever this thread asks through OpenAI's client is a call of this episode."""
    _patch_openai()
    _ASKING.set(calls)


def _current() -> ModelCalls:
    calls = _ASKING.get(None)
    assert calls is not None, "only what an episode asks comes here"
    return calls


@functools.cache
def _patch_openai() -> None:
    openai, httpx = importlib.import_module("openai"), importlib.import_module("httpx")
    headers = {"content-type": "application/json"}

    class TakenOver(httpx.AsyncBaseTransport, httpx.BaseTransport):  # type: ignore[name-defined, misc]
        async def handle_async_request(self, request: Any) -> Any:
            answer = await _current().ask(request.url.path, await request.aread())
            return httpx.Response(200, headers=headers, content=answer)

        def handle_request(self, request: Any) -> Any:
            answer = _current().ask_blocking(request.url.path, request.read())
            return httpx.Response(200, headers=headers, content=answer)

    for kind, http in ((openai.AsyncOpenAI, httpx.AsyncClient), (openai.OpenAI, httpx.Client)):
        own = kind(api_key="none", base_url=NOWHERE, max_retries=0, http_client=http(transport=TakenOver()))
        kind.request = _instead(kind.request, own)


def _instead(request: Any, own: Any) -> Any:
    """A client's method that asks as `own` does inside an episode. Coroutine or not, it is handed back as it is."""

    @functools.wraps(request)
    def routed(self: Any, *arguments: Any, **named: Any) -> Any:
        return request(self if _ASKING.get(None) is None else own, *arguments, **named)

    return routed


def verifiers_client() -> Any:
    """The client that an environment finds in its state."""
    openai, clients = importlib.import_module("openai"), importlib.import_module("verifiers.clients")
    return clients.OpenAIChatCompletionsClient(openai.AsyncOpenAI(api_key="none", base_url=NOWHERE))


def _tokens_of(answer: bytes) -> int | None:
    """What the server says that it drew; None: it says nothing that can be believed."""
    usage = json.loads(answer).get("usage")
    drawn = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return drawn if isinstance(drawn, int) and drawn >= 0 else None


def _last_message(question: Mapping[str, Any]) -> str:
    messages = question.get("messages") or [{}]
    content = messages[-1].get("content")
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} [...] {text[-most // 2 :]}"
