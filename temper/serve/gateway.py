"""From an understood request to drawn tokens and back: admission, drawing, recording, streaming.

Owns: what is in flight and how many may be. Refuses: HTTP (app.py) and knowing shapes (asked.py, answers.py).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from temper.errors import BackendError
from temper.serve.answers import (
    DONE,
    STILL_HERE,
    Answer,
    Piece,
    ResponseHead,
    Shape,
    chunk,
    event,
    last_chunk,
    usage,
    usage_chunk,
    whole_body,
)
from temper.serve.asked import ChatRequest, read_asked
from temper.serve.conversation import ChatPrompt, Conversations
from temper.serve.orders import AsAsked, Ordering, ServerLimits
from temper.serve.records import Entry, Records
from temper.serve.refusals import Refused
from temper.serve.responses import response_of, stream_of
from temper.serve.text import TextStream, Words
from temper.types import Completion, Finish, Request

T = TypeVar("T")
HEARTBEAT_SECONDS = 15.0
ENDING_SECONDS = 10.0
"""How long requests that were told to end may take to do so."""


class Engine(Protocol):
    """A Sampler that can be watched while it draws; engine/local implements it."""

    @property
    def version(self) -> int: ...

    async def generate(
        self, request: Request, *, watch: Callable[[list[int], list[float]], None] | None = None
    ) -> Completion: ...

    async def abort(self, request_id: str) -> None: ...

    def utilisation(self) -> Mapping[str, float]:
        """For the metrics page: whole names; those of totals end with _total."""
        ...


@dataclass(slots=True, kw_only=True)
class Job:
    """One completion on its way. What was drawn and not yet sent waits here: never more than its max_new_tokens."""

    index: int
    prompt: ChatPrompt
    request: Request
    text: TextStream
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_taken: int = 0
    is_started: bool = False
    """Whether a piece was taken."""
    is_ended: bool = False
    """Whether its last piece was taken."""
    is_drawing: bool = False
    """Whether the engine has it: before that another request may run under the same id."""

    def take(self, completion: Completion | None = None) -> Piece:
        """Everything drawn since the last time; with the completion, whatever was missing and the end of the text."""
        if completion is not None:
            self.token_ids, self.logprobs = list(completion.token_ids), list(completion.logprobs)
        fresh = slice(self.num_taken, len(self.token_ids))
        ids, logprobs = tuple(self.token_ids[fresh]), tuple(self.logprobs[fresh])
        text = self.text.push(ids) if ids else ""
        text += self.text.finish() if completion is not None else ""
        is_first = not self.is_started and bool(ids or completion)
        self.is_started, self.num_taken = self.is_started or is_first, len(self.token_ids)
        return Piece(
            index=self.index,
            text=text,
            token_ids=ids,
            logprobs=logprobs,
            is_first=is_first,
            prompt_ids=self.prompt.ids if is_first else (),
        )


def text_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="serve text")


class News:
    """Tells one listener that something has happened since it last asked."""

    def __init__(self) -> None:
        self._happened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def tell(self) -> None:
        if not self._happened.done():
            self._happened.set_result(None)

    async def happened(self) -> bool:
        """Waits for news; False when none came before a heartbeat was due."""
        await asyncio.wait((self._happened,), timeout=HEARTBEAT_SECONDS)
        if not self._happened.done():
            return False
        self._happened = asyncio.get_running_loop().create_future()
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One admitted request."""

    head: ResponseHead
    asked: ChatRequest
    prompts: tuple[ChatPrompt, ...]
    jobs: tuple[Job, ...]


class Gateway:
    """Everything behind HTTP. Lives in the engine's event loop; text work happens in one thread beside it."""

    def __init__(
        self,
        engine: Engine,
        conversations: Conversations,
        records: Records | None,
        limits: ServerLimits,
        *,
        ordering: Ordering | None = None,
        worker: ThreadPoolExecutor | None = None,
    ) -> None:
        """ordering: what is asked of the engine; None: what clients ask. worker: the text thread of several gateways;
        None: one of its own."""
        self._engine = engine
        self._conversations = conversations
        self._records = records
        self.limits = limits
        self._ordering = ordering or AsAsked(limits)
        # One thread: tokenizers and SQLite are used by one at a time, and a long text never holds up the engine.
        self._worker = worker or text_thread()
        self._in_flight = 0
        self._running: dict[str, asyncio.Future[None]] = {}
        self._totals = {"completions_total": 0.0, "refused_total": 0.0, "aborted_total": 0.0}
        self._is_ending = False
        self.failure: BackendError | None = None
        """Set once the engine has failed: nothing will be drawn any more."""

    async def open(self, path: str, body: bytes, session: str) -> Exchange:
        """Understands a request and makes room for it; whoever opens must close."""
        if self.failure is not None:
            raise Refused("the engine has failed", status=503, kind="server_error", code="engine_failed")
        self._require_open()
        try:
            self._require_room(1)  # before any work is done for a client that is sent away anyhow
            asked, prompts = await self._in_thread(lambda: self._understand(path, body, session))
            return await self._exchange(asked, prompts)
        except Refused:
            self._totals["refused_total"] += 1
            raise

    def close(self, exchange: Exchange) -> None:
        self._in_flight -= len(exchange.jobs)
        for job in exchange.jobs:
            self._ordering.give_back(job.request)

    async def end(self) -> None:
        """Ends everything under way, and returns when what was drawn so far is recorded."""
        self._is_ending = True
        deadline = time.monotonic() + ENDING_SECONDS
        while self._in_flight and time.monotonic() < deadline:
            for request_id in list(self._running):  # each time: one that waited for another may have begun since
                await self._engine.abort(request_id)
            await asyncio.sleep(0.02)

    async def answer(self, exchange: Exchange) -> Shape:
        """The whole response, when all its choices are drawn. Cancelling it ends them."""
        tasks = {asyncio.create_task(self._draw(exchange, job, None)): job for job in exchange.jobs}
        try:
            pending = set(tasks)
            while pending and not any(task.done() and task.exception() for task in tasks):
                # Not a plain await of each: cancelling this would cancel the drawing before it is recorded.
                _, pending = await asyncio.wait(pending, timeout=HEARTBEAT_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
            answers = [await task for task in tasks]
        finally:
            await self._end(tasks)
        body = _whole(exchange, answers, self._conversations.words)
        return response_of(body) if exchange.asked.is_response else body

    async def events(self, exchange: Exchange) -> AsyncIterator[bytes]:
        """Server-sent events. A reader that comes late gets what was drawn meanwhile in one piece."""
        head, asked, words = exchange.head, exchange.asked, self._conversations.words
        news = News()
        tasks = {asyncio.create_task(self._draw(exchange, job, news)): job for job in exchange.jobs}
        answers: list[Answer] = []
        try:
            while len(answers) < len(tasks):
                if not await news.happened():
                    yield STILL_HERE
                for task, job in tasks.items():
                    if job.is_ended:
                        continue
                    if task.done():
                        job.is_ended = True
                        answers.append(answer := await task)
                        if asked.is_response:  # all of its events follow when it is whole
                            continue
                        yield event(chunk(head, asked, _last_piece(job, answer, asked), words))
                        yield event(last_chunk(head, asked, answer, words))
                    elif not asked.tools and not asked.is_response and (piece := job.take()).tells(asked):
                        yield event(chunk(head, asked, piece, words))
        finally:
            await self._end(tasks)
        for part in _closing(exchange, answers, words):
            yield part

    def metrics(self) -> Mapping[str, float]:
        own = {**self._totals, "in_flight": float(self._in_flight), "version": float(self._engine.version)}
        return {**{f"temper_serve_{name}": value for name, value in own.items()}, **self._engine.utilisation()}

    def shut(self) -> None:
        """Ends the text thread. Everything must have been closed before."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        if self._records is not None:
            self._records.close()

    def _require_open(self) -> None:
        if self._is_ending:
            raise Refused("the server is shutting down", status=503, kind="server_error", code="shutting_down")

    def _require_room(self, wanted: int) -> None:
        if self._in_flight + wanted > self.limits.max_in_flight:
            raise Refused(
                f"{self._in_flight} completions run or wait already, and at most {self.limits.max_in_flight} may: "
                "come back later",
                status=429,
                kind="rate_limit_error",
                code="rate_limit_exceeded",
            )

    def _understand(self, path: str, body: bytes, session: str) -> tuple[ChatRequest, tuple[ChatPrompt, ...]]:
        asked = read_asked(path, body, session)
        if self.limits.model and asked.model != self.limits.model:
            raise Refused(
                f'the model "{asked.model}" is not here: this server has "{self.limits.model}"',
                status=404,
                param="model",
                code="model_not_found",
            )
        return asked, self._conversations.prompts(asked)

    async def _exchange(self, asked: ChatRequest, prompts: tuple[ChatPrompt, ...]) -> Exchange:
        """Ordered last: what is refused before uses nothing up."""
        wanted = [prompt for prompt in prompts for _ in range(asked.num_choices)]
        if len(wanted) > self.limits.max_in_flight:
            most = self.limits.max_in_flight
            raise Refused(f"{len(wanted)} completions at once are more than the {most} of this server", param="n")
        self._require_room(len(wanted))
        if not all(prompt.ids for prompt in prompts):
            raise Refused("the prompt has no tokens", param=asked.prompt_name)
        name = f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._in_flight += len(wanted)  # also while it waits for others
        try:
            requests = await self._ordering.order(name, [prompt.ids for prompt in wanted], asked)
        except BaseException:
            self._in_flight -= len(wanted)
            raise
        words = self._conversations.words
        jobs = [
            Job(index=index, prompt=prompt, request=request, text=TextStream(words, request.params.stop))
            for index, (prompt, request) in enumerate(zip(wanted, requests, strict=True))
        ]
        head = ResponseHead(id=name, created=int(time.time()), model=asked.model, version=self._engine.version)
        return Exchange(head=head, asked=asked, prompts=prompts, jobs=tuple(jobs))

    async def _draw(self, exchange: Exchange, job: Job, news: News | None) -> Answer:
        """One completion, drawn and recorded. `news` hears whenever there is something to send."""

        def watch(token_ids: list[int], logprobs: list[float]) -> None:
            job.token_ids += token_ids
            job.logprobs += logprobs
            if news is not None:
                news.tell()

        ended = await self._claim(job.request.id)
        job.is_drawing = True
        try:
            self._require_open()
            completion = await self._engine.generate(job.request, watch=watch if news is not None else None)
            answer = await self._in_thread(lambda: self._finish(exchange, job, completion))
        except BackendError as error:
            self.failure = error
            raise
        finally:
            job.is_drawing = False
            del self._running[job.request.id]
            ended.set_result(None)
            if news is not None:
                asyncio.get_running_loop().call_soon(news.tell)  # when this task is done
        self._totals["completions_total"] += 1
        if completion.finish in (Finish.ABORT, Finish.INTERRUPT):
            self._totals["aborted_total"] += 1
            raise Refused("the request was aborted", status=503, kind="server_error", code="aborted")
        return answer

    async def _claim(self, request_id: str) -> asyncio.Future[None]:
        """Waits for a running request with the same id: equal ones with an equal seed share it, and so the draws."""
        while (running := self._running.get(request_id)) is not None:
            await asyncio.wait((running,), timeout=HEARTBEAT_SECONDS)
        ended = self._running[request_id] = asyncio.get_running_loop().create_future()
        return ended

    def _finish(self, exchange: Exchange, job: Job, completion: Completion) -> Answer:
        """Reads the answer out of what was drawn, and writes it down."""
        asked, words = exchange.asked, self._conversations.words
        stream = TextStream(words, job.request.params.stop)
        text = stream.push(completion.token_ids) + stream.finish()
        content, calls = self._conversations.reply(text, asked) if asked.is_chat else (text, ())
        if self._records is not None:
            ids = completion.token_ids
            has_end = bool(ids) and ids[-1] in job.request.params.stop_ids
            self._records.add(
                Entry(
                    request_id=exchange.head.id,
                    choice=job.index,
                    session=asked.session,
                    model=asked.model,
                    created=time.time(),
                    origin=job.prompt.origin,
                    reply=text,
                    said=words.decode_all(ids[:-1] if has_end else ids),
                    drawn_text=words.decode_all(ids),
                    # Cut off a stop text and the client holds another text than was drawn: its history is a fork.
                    reply_key=None if stream.was_cut else self._conversations.reply_key(asked, text),
                    completion=completion,
                )
            )
        return Answer(
            index=job.index,
            completion=completion,
            text=text,
            was_cut=stream.was_cut,
            content=content,
            calls=calls,
        )

    async def _end(self, tasks: Mapping[asyncio.Task[Answer], Job]) -> None:
        """Nothing of an exchange outlives it: what still draws, because the client or a sibling failed, is ended."""
        for task, job in tasks.items():
            if job.is_drawing:
                await self._engine.abort(job.request.id)
            elif not task.done():
                task.cancel()
        if running := [task for task in tasks if not task.done()]:
            await asyncio.wait(running, timeout=ENDING_SECONDS)
        for task in tasks:
            if not task.done():
                task.cancel()
            elif not task.cancelled():
                task.exception()  # looked at, so that asyncio does not complain about the siblings of a failure

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)


def _whole(exchange: Exchange, answers: Sequence[Answer], words: Words) -> Shape:
    counts = usage([prompt.ids for prompt in exchange.prompts], answers)
    return whole_body(exchange.head, exchange.asked, answers, counts, words)


def _closing(exchange: Exchange, answers: Sequence[Answer], words: Words) -> Iterator[bytes]:
    """How a stream ends, when all its choices are drawn: as a response it is said only now."""
    if exchange.asked.is_response:
        yield from stream_of(_whole(exchange, answers, words))
        return
    if exchange.asked.has_usage_chunk:
        counts = usage([prompt.ids for prompt in exchange.prompts], answers)
        yield event(usage_chunk(exchange.head, exchange.asked, counts))
    yield DONE


def _last_piece(job: Job, answer: Answer, asked: ChatRequest) -> Piece:
    """What is left to send. With tools nothing was sent: only the whole text tells a call from words."""
    piece = job.take(answer.completion)
    return replace(piece, text=answer.content or "") if asked.tools else piece
