"""A sampler that answers over a socket.

Owns: the sampler process's side of every verb. Refuses: opening models (order.py), and drawing before it was fed:
a sampler that joins, or that a publication did not reach, is stale.
"""

from __future__ import annotations

import asyncio
import select
import socket
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from temper.engine.process.saving import Saver
from temper.engine.process.weights import SharedWeights
from temper.engine.process.wire import (
    Frame,
    completion_frame,
    error_frame,
    params_of,
    read_frame,
    requests_of,
    to_bytes,
)
from temper.errors import BackendError, EngineLost, TemperError
from temper.protocols import Sampler
from temper.types import Completion, Publication, Request

if TYPE_CHECKING:
    from temper.engine.local.warming import ExpectedRequests

BEAT_SECONDS = 1.0
"""Between two signs of life while a model is opened or warmed up."""
FLUSH_SECONDS = 10.0
"""For the last words of a process that ends."""


class ServedSampler(Sampler, Protocol):
    """What a sampler process serves: Temper's own engine, vLLM, or a fake in tests."""

    async def warm_up(self, expected: ExpectedRequests, tell: Callable[[int, int], None]) -> None: ...

    async def digests(self) -> Mapping[str, str]:
        """Of the tensors that it draws with, by name."""
        ...

    def so_far(self, least: Mapping[str, int]) -> Mapping[str, Completion]:
        """What was drawn of these requests, by id, where it is so many tokens or more; they go on."""
        ...


Open = Callable[[str], Awaitable[ServedSampler]]
"""From the text of an order to a sampler; slow."""


async def serve(connection: socket.socket, weights: SharedWeights, opener: Open) -> None:
    """Answers until the other side asks to close or hangs up. When the engine is lost the process ends, and hangs up.

    Waits for: questions. Unblocked by: the other side's death, which ends the connection.
    """
    reader, writer = await asyncio.open_connection(sock=connection)
    order = await read_frame(reader)
    if order is None:
        return
    try:
        with _beating(connection):
            sampler = await opener(str(order.fields["order"]))
    except Exception as error:  # told to who asked, who raises it again
        traceback.print_exc()
        await _last_words(writer, error_frame(order.call, error))
        return
    server = Server(sampler, weights, writer, connection)
    server.send(Frame("opened", order.call))
    try:
        while (frame := await read_frame(reader)) is not None and frame.verb != "close":
            await server.answer(frame)
    finally:
        await server.close()
        writer.close()
    if server.loss is not None:
        raise SystemExit(f"the engine is lost: {server.loss}")


@contextmanager
def _beating(connection: socket.socket) -> Iterator[Callable[[Frame], None]]:
    """Signs of life from a thread, while this one opens a model or warms it up: its own words, which it says through
    what is yielded, and others between them. Nobody else writes meanwhile."""
    words: SimpleQueue[Frame | None] = SimpleQueue()

    def beat() -> None:
        frame: Frame | None = Frame("beat")
        while frame is not None:
            unsent = to_bytes(frame)
            while unsent:  # a whole frame or none: the next one must be understood
                try:
                    unsent = unsent[connection.send(unsent) :]
                except BlockingIOError:
                    select.select([], [connection], [], BEAT_SECONDS)
                except OSError:
                    return  # nobody is there; the event loop sees it, too
            try:
                frame = words.get(timeout=BEAT_SECONDS)
            except Empty:
                frame = Frame("beat")

    thread = threading.Thread(target=beat, name="signs of life", daemon=True)
    thread.start()
    try:
        yield words.put
    finally:
        words.put(None)
        thread.join(FLUSH_SECONDS)
        if thread.is_alive():  # half a frame is out, and nothing may be said behind it
            raise EngineLost(f"nobody has taken what this sampler says for {FLUSH_SECONDS:g} s")


async def _flush(writer: asyncio.StreamWriter) -> None:
    """Returns when everything has left this process, so that somebody else may write."""
    writer.transport.set_write_buffer_limits(0)
    async with asyncio.timeout(FLUSH_SECONDS):
        await writer.drain()


async def _last_words(writer: asyncio.StreamWriter, frame: Frame) -> None:
    writer.write(to_bytes(frame))
    async with asyncio.timeout(FLUSH_SECONDS):
        await writer.drain()
        writer.close()
        await writer.wait_closed()


class Server:
    """One sampler and one connection."""

    def __init__(
        self,
        sampler: ServedSampler,
        weights: SharedWeights,
        writer: asyncio.StreamWriter,
        connection: socket.socket,
    ) -> None:
        """connection: that of the writer."""
        self._sampler, self._weights, self._writer, self._connection = sampler, weights, writer, connection
        self._is_fed = False
        self.loss: EngineLost | None = None
        """Why nothing can be drawn any more."""
        self._drawing: set[asyncio.Task[None]] = set()
        self._saver = Saver(sampler.so_far, self.send)
        self._saving = asyncio.create_task(self._saver.run(), name="what was drawn so far")
        self._saving.add_done_callback(self._saving_ended)
        self._verbs: dict[str, Callable[[Frame], Any]] = {
            "generate": self._generate,
            "abort": lambda frame: self._sampler.abort(frame.fields["id"]),
            "interrupt": lambda frame: self._sampler.interrupt(frame.fields["id"]),
            "piece": self._put,
            "load": self._load,
            "warm_up": self._warm_up,
            "ping": self._ping,
            "digests": self._digests,
            "rest": self._rest,
        }

    def send(self, frame: Frame) -> None:
        if not self._writer.is_closing():
            self._writer.write(to_bytes(frame))

    async def answer(self, frame: Frame) -> None:
        """In the order of questions. What is drawn is answered when it is done."""
        try:
            await self._verbs[frame.verb](frame)
        except EngineLost as error:
            self._hang_up(error)
        except Exception as error:  # told to who asked, who raises it again
            if not isinstance(error, TemperError):
                traceback.print_exc()
            self.send(error_frame(frame.call, error))

    async def close(self) -> None:
        for task in (self._saving, *self._drawing):
            task.cancel()
        await self._sampler.close()

    async def _generate(self, frame: Frame) -> None:
        for call, request in requests_of(frame):
            task = asyncio.create_task(self._draw(call, request))
            self._drawing.add(task)
            task.add_done_callback(self._drawing.discard)
        await asyncio.sleep(0)  # they are in the engine before the next question, which may be to end one of them

    async def _ping(self, frame: Frame) -> None:
        self.send(Frame("pong", frame.call))

    async def _digests(self, frame: Frame) -> None:
        self.send(Frame("digests", frame.call, {"digests": dict(await self._sampler.digests())}))

    async def _rest(self, frame: Frame) -> None:
        """Stale again, and nothing of the trainer's memory is held."""
        self._is_fed = False
        self._weights.forget()
        self.send(Frame("rested", frame.call))

    async def _draw(self, call: int, request: Request) -> None:
        try:
            if not self._is_fed:
                raise BackendError("the sampler is stale: no publication has reached it yet")
            with self._saver.drawing(call, request.id):
                completion = await self._sampler.generate(request)
            self.send(completion_frame(call, completion))
        except EngineLost as error:
            self._hang_up(error)
        except Exception as error:  # told to who asked, who raises it again
            self.send(error_frame(call, error))

    def _hang_up(self, loss: EngineLost) -> None:
        """In place of an answer: to who asked this sampler has ended, and another may take its place."""
        self.loss = self.loss or loss
        self._writer.transport.abort()

    def _saving_ended(self, saving: asyncio.Task[None]) -> None:
        """An engine that cannot say what it drew is broken, and silence would look like nothing to tell."""
        if not saving.cancelled() and (error := saving.exception()) is not None:
            traceback.print_exception(error)
            self._hang_up(EngineLost(f"it could not tell what it drew so far: {error!r}"))

    async def _put(self, frame: Frame) -> None:
        self._weights.put(frame.fields["start"], frame.arrays[0], frame.fields["size"])

    async def _load(self, frame: Frame) -> None:
        """Nothing is drawn between the first tensor and the last: engines take weights over between two steps. One that
        breaks on the way is stale. The same publication once more changes nothing."""
        publication = self._weights.read(frame.fields)
        try:
            await self._sampler.load(publication)
        except BackendError:
            raise  # refused before anything was changed, or by an engine that then refuses to draw
        except BaseException:
            self._is_fed = False
            raise
        _finish_copies(publication)
        self._is_fed = True
        # What it counted since the last publication goes along: whoever asks for counts cannot wait for an answer.
        told = {"version": self._sampler.version, "stats": dict(self._sampler.stats())}
        self.send(Frame("loaded", frame.call, told))

    async def _warm_up(self, frame: Frame) -> None:
        """Nothing is drawn meanwhile, so nobody else has anything to say."""
        await _flush(self._writer)
        with _beating(self._connection) as say:
            from temper.engine.local.warming import ExpectedRequests

            def tell(done: int, total: int) -> None:
                say(Frame("progress", frame.call, {"done": done, "total": total}))

            told = frame.fields
            await self._sampler.warm_up(ExpectedRequests(**{**told, "params": params_of(told["params"])}), tell)
        self.send(Frame("warmed_up", frame.call))


def _finish_copies(publication: Publication) -> None:
    """The trainer may write to its own memory as soon as it has the acknowledgement."""
    if any(tensor.is_cuda for tensor in publication.tensors.values()):
        import torch

        torch.cuda.synchronize()
