"""A sampler that lives in another process, asked over a socket.

Owns: the Sampler protocol on this side, requests under way, publication as a transaction, what is said when the other
process ends. Refuses: starting it (cluster/child.py), and repeating what was lost: a resume does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from temper.engine.digests import Digests, differing
from temper.engine.fleet.member import SamplerLost
from temper.engine.in_flight import InFlight
from temper.engine.process.questions import ORDER, Questions, Tell
from temper.engine.process.sent_weights import SentWeights
from temper.engine.process.weights import SharedWeights
from temper.engine.process.wire import Frame, completion_of, read_frame, request_frame, to_bytes
from temper.errors import BackendError, UserError
from temper.types import Completion, Publication, Request

if TYPE_CHECKING:
    from temper.engine.local.warming import ExpectedRequests

SETTLING_PASSES = 3
"""Turns of the event loop without a new request before requests are sent, in one frame: what is admitted together then
depends on the data and not on timing, as in an engine of this process."""
OPEN_SECONDS = 900.0
"""To load a model, or to warm up."""
LOOK_SECONDS = 1.0
"""Between two looks whether it still says something."""
START_SECONDS = 120.0
"""For a process to begin: it says nothing before."""
LEAST_SILENT_SECONDS = 10.0
"""While a model is opened or warmed up. Libraries that are loaded hold Python's lock, on a crowded machine for
seconds."""
LOAD_SECONDS = 600.0
"""To take over one publication, where nobody says otherwise."""
END_SECONDS = 10.0
"""For a process that hung up to end, so that it can be said how; and for one that was asked to end."""


class Process(Protocol):
    """Whose sampler it is."""

    name: str

    def wait(self, seconds: float) -> str | None:
        """How it ended, with its last lines. None: it still runs."""
        ...

    def kill(self) -> None: ...


class Caller(Protocol):
    """A sampler process on its way to us."""

    def wait(self, is_over: Callable[[], bool]) -> socket.socket:
        """Its connection. OSError when it does not come in time, or when it is over before."""
        ...


class SignsOfLife:
    """Of a process that opens its model or warms up, from the moment when it was asked to."""

    def __init__(self) -> None:
        self._last, self._has_begun = time.monotonic(), False

    def heard(self) -> None:
        self._last, self._has_begun = time.monotonic(), True

    def asked(self) -> None:
        """It owed nothing before, and need not have said anything."""
        self._last = time.monotonic()

    async def wait_for(self, answer: asyncio.Future[Frame], silent_seconds: float, what: str) -> str:
        """Why it is given up; empty: it has answered."""
        end = time.monotonic() + OPEN_SECONDS
        while not answer.done():
            silent = max(silent_seconds, LEAST_SILENT_SECONDS if self._has_begun else START_SECONDS)
            if time.monotonic() > min(end, self._last + silent):
                missed = (
                    f"{what} within {OPEN_SECONDS:g} s" if time.monotonic() > end else f"say a word for {silent:g} s"
                )
                return f"it did not {missed}, and was ended"
            await asyncio.wait([answer], timeout=LOOK_SECONDS)
        return ""


class ProcessSampler:
    """Implements protocols.Sampler and engine.fleet.member.Member. One event loop asks it."""

    def __init__(
        self,
        connection: socket.socket | Caller,
        weights: SharedWeights | SentWeights,
        process: Process,
        *,
        order: str,
    ) -> None:
        """The order is sent at once: the other process opens its model while this one goes on.

        connection: or who waits for it, where the other process has to call back from another machine. weights: may be
        those of several samplers, and are closed by whoever made them.
        """
        self._connection, self._weights, self._process, self.name = connection, weights, process, process.name
        self._order = to_bytes(Frame("order", ORDER, {"order": order}))
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._opening: asyncio.Future[Frame] | None = None
        self._questions = Questions()
        self._outbox: list[tuple[int, Request]] = []
        self._sender: asyncio.Task[None] | None = None
        self._publishing = asyncio.Lock()
        self._version, self._is_fed, self._is_closed = 0, False, False
        self._signs = SignsOfLife()
        self._failure = ""
        """Why nothing can be asked any more; '' when all is well."""
        self._in_flight = InFlight()
        self._stats: Mapping[str, float] = {}
        if isinstance(connection, socket.socket):
            connection.sendall(self._order)

    @property
    def version(self) -> int:
        return self._version

    async def opened(self, silent_seconds: float = OPEN_SECONDS) -> None:
        """Returns when it is connected and has loaded its model. One that shows no sign of life for silent_seconds
        while it does is ended, and raises SamplerLost."""
        if self._opening is None:
            first, self._opening = self._questions.ask()
            assert first == ORDER, "nothing is asked before the order"
            reader, self._writer = await asyncio.open_connection(sock=await self._connected())
            self._signs = SignsOfLife()
            self._listener = asyncio.create_task(self._listen(reader), name="answers of a sampler process")
        self._require_whole()
        if missed := await self._signs.wait_for(self._opening, silent_seconds, "open its model"):
            self._give_up(missed)
        await self._opening

    async def _connected(self) -> socket.socket:
        if isinstance(self._connection, socket.socket):
            return self._connection
        try:
            connection = await asyncio.to_thread(self._connection.wait, self._is_over)
            await asyncio.to_thread(connection.sendall, self._order)
        except OSError as error:
            ended = self._process.wait(0.0)
            self._give_up(ended or f"it did not come: {error}")
            raise self._failed() from error
        except UserError as error:  # it refuses us
            self._give_up(str(error))
            raise
        self._connection = connection
        return connection

    def _is_over(self) -> bool:
        """Whether a process that was to call back need not be waited for any more."""
        return self._is_closed or self._process.wait(0.0) is not None

    async def generate(self, request: Request) -> Completion:
        """Waits for: the other process. Unblocked by: its answer or its death; a deadline is the episode's."""
        self._require_whole()
        if not self._is_fed:
            raise BackendError(f"{self._process.name} is stale: publish weights before asking for tokens")
        call, answer = self._new_call()
        self._outbox.append((call, request))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_settled(), name="requests to a sampler process")
        with self._in_flight.request():
            try:
                return completion_of(await answer)
            finally:
                if self._questions.drop(call) and not self._failure:  # its caller was cancelled
                    await self.abort(request.id)

    async def abort(self, request_id: str) -> None:
        self._end(request_id, "abort")

    async def interrupt(self, request_id: str) -> None:
        self._end(request_id, "interrupt")

    async def load(self, publication: Publication, seconds: float = LOAD_SECONDS) -> None:
        """A transaction: written aside while the sampler draws, checked as a whole, taken over between two tokens,
        acknowledged. What does not fit changes nothing. One that takes nothing for so many seconds is ended.

        Also when its caller is cancelled: the next publication must not be written under one that is being read.
        """
        await asyncio.shield(asyncio.ensure_future(self._publish(publication, seconds)))

    async def feed(self, publication: Publication, published: Digests, seconds: float) -> list[str]:
        await self.load(publication, seconds)
        return await self.differences(published, seconds)

    async def differences(self, published: Digests, seconds: float) -> list[str]:
        held = (await self._ask("digests", seconds, "tell what it holds")).fields["digests"]
        return differing(published.read(), held)

    def stats(self) -> Mapping[str, float]:
        """As counted up to the last publication; the seconds with requests in flight up to now."""
        counted, self._stats = self._stats, {}
        return {**counted, "drawing_seconds": self._in_flight.seconds()}

    async def warm_up(self, expected: ExpectedRequests, tell: Tell, silent_seconds: float = OPEN_SECONDS) -> None:
        """What LocalEngine.warm_up does, over there. One that shows no sign of life for so long is ended."""
        await self.opened(silent_seconds)
        call, answer = self._new_call(tell)
        self._signs.asked()
        self._send(Frame("warm_up", call, dataclasses.asdict(expected)))
        if missed := await self._signs.wait_for(answer, silent_seconds, "warm up"):
            self._give_up(missed)
        await answer

    async def ping(self, seconds: float) -> None:
        """Returns when it answers. One that owes an answer for so long is ended, and raises SamplerLost."""
        await self._ask("ping", seconds, "answer")

    async def rest(self, seconds: float) -> None:
        """Stale again, with its model open, and without a hold on the memory of a trainer that goes."""
        async with self._publishing:
            self._is_fed = False
            if self._writer is not None:
                await self._ask("rest", seconds, "rest")
            self._weights.forget()

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._writer is None:
            if isinstance(self._connection, socket.socket):
                self._connection.close()  # it sees that nobody is there
        elif not self._failure:
            self._send(Frame("close"))
        if await asyncio.to_thread(self._process.wait, END_SECONDS) is None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait, END_SECONDS)
        self._break("it was closed")
        if self._listener is not None:
            await asyncio.wait([self._listener], timeout=END_SECONDS)
        if self._writer is not None:
            self._writer.transport.abort()  # close() would wait for a cut connection to take what is left

    async def _publish(self, publication: Publication, seconds: float) -> None:
        async with self._publishing:
            await self.opened(seconds)
            told = await self._weights.hand_over(publication, lambda piece: self._send_piece(piece, seconds))
            loaded = await self._ask("load", seconds, f"take over publication {publication.version}", told)
            if loaded.fields["version"] != publication.version:
                held = loaded.fields["version"]
                raise BackendError(f"{self.name} acknowledged version {held} instead of {publication.version}")
            self._version, self._is_fed = publication.version, True
            self._stats = loaded.fields["stats"]

    async def _ask(self, verb: str, seconds: float, what: str, told: Mapping[str, Any] = {}) -> Frame:
        """The answer. A process that owes one for longer is of no use any more, and is ended."""
        call, answer = self._new_call()
        self._send(Frame(verb, call, dict(told)))
        done, _ = await asyncio.wait([answer], timeout=seconds)
        if not done:
            self._give_up(f"it did not {what} within {seconds:g} s, and was ended")
        return await answer

    def _give_up(self, why: str) -> None:
        self._process.kill()
        self._break(why)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Waits for: answers. Unblocked by: the other process's death, or close()."""
        try:
            while (frame := await read_frame(reader)) is not None:
                self._signs.heard()
                if frame.verb != "beat":
                    self._questions.take(frame)
        except BackendError as error:
            self._give_up(str(error))
        except asyncio.CancelledError:  # the event loop ends, and nobody has closed this
            self._process.kill()
            raise
        if self._failure or self._is_closed:
            return
        ended = await asyncio.to_thread(self._process.wait, END_SECONDS)
        self._give_up(ended or "it hung up and did not end")

    async def _send_settled(self) -> None:
        quiet, seen = 0, len(self._outbox)
        while quiet < SETTLING_PASSES:
            await asyncio.sleep(0)
            quiet = quiet + 1 if len(self._outbox) == seen else 0
            seen = len(self._outbox)
        self._send_requests()

    def _send_requests(self) -> None:
        asked, self._outbox = [(call, request) for call, request in self._outbox if call in self._questions], []
        if asked:
            self._send(request_frame(asked))

    def _end(self, request_id: str, verb: str) -> None:
        """After the requests that were handed in before: one of them may be meant."""
        if self._writer is not None and not self._failure:
            self._send_requests()
            self._send(Frame(verb, fields={"id": request_id}))

    def _send(self, frame: Frame) -> None:
        assert self._writer is not None, "nothing is sent before the first publication"
        if not self._failure:  # else whoever waits for an answer has been told
            self._writer.write(to_bytes(frame))

    async def _send_piece(self, frame: Frame, seconds: float) -> None:
        """Weights go in pieces, and no faster than they are taken. Who does not take one for so long is ended."""
        self._require_whole()
        self._send(frame)
        assert self._writer is not None, "nothing is sent before it is connected"
        try:
            async with asyncio.timeout(seconds):
                await self._writer.drain()
        except OSError as error:
            late = f"it did not take weights within {seconds:g} s, and was ended"
            is_late = isinstance(error, TimeoutError)
            ended = None if is_late else await asyncio.to_thread(self._process.wait, END_SECONDS)
            self._give_up(late if is_late else ended or f"the connection to it broke: {error}")
            raise self._failed() from error

    def _new_call(self, tell: Tell | None = None) -> tuple[int, asyncio.Future[Frame]]:
        self._require_whole()
        return self._questions.ask(tell)

    def _require_whole(self) -> None:
        if self._failure:
            raise self._failed()

    def _failed(self, so_far: Completion | None = None) -> SamplerLost:
        return SamplerLost(f"{self._process.name}: {self._failure}", so_far)

    def _break(self, why: str) -> None:
        """Fails every question that waits, and every later one."""
        self._failure = self._failure or why
        self._questions.fail(self._failed)
