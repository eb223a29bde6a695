"""Samplers that somebody started already, reached by their addresses (`temper sampler`, cluster/listener.py).

Owns: calling them, and what their end looks like from here. Refuses: starting and killing them: who hangs up is rid of
them. The words of the first meeting are in handshake.py.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from temper.cluster.handshake import introduce
from temper.cluster.remote import CALL_SECONDS, POLL_SECONDS, prepare
from temper.engine.process.client import ProcessSampler
from temper.engine.process.sent_weights import SentWeights
from temper.errors import UserError

CONNECT_SECONDS = 10.0
HUNG_UP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


def has_hung_up(connection: socket.socket, seconds: float) -> bool:
    """Whether the other side did, or this one: also where answers that it gave before are still unread."""
    poll = select.poll()
    poll.register(connection, HUNG_UP)
    return bool(poll.poll(1000 * seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """A run, as samplers know it."""

    key: str
    run: str
    """A name that no other run has."""
    silent_seconds: float


class SamplerLine:
    """Implements engine.process.client.Process for a process that is not ours: it ends, for us, with the connection."""

    def __init__(self, address: str) -> None:
        self.name = f"the sampler at {address}"
        self._connection: socket.socket | None = None
        self._is_over = threading.Event()

    def begin(self, connection: socket.socket) -> None:
        self._connection = connection.dup()

    def wait(self, seconds: float) -> str | None:
        """How it ended. None: it still runs."""
        connection = self._connection
        if connection is None or self._is_over.is_set():
            return "the connection to it was closed here" if self._is_over.wait(seconds) else None
        if not has_hung_up(connection, seconds):
            return None
        self._end()
        return "it hung up, or it cannot be reached any more; its own machine knows why"

    def kill(self) -> None:
        """Hangs up. What draws over there ends when it sees that, and with the next call at the latest."""
        if self._connection is not None and not self._is_over.is_set():
            with suppress(OSError):  # the other side was faster
                self._connection.shutdown(socket.SHUT_RDWR)
        self._end()

    def _end(self) -> None:
        if not self._is_over.is_set():
            self._is_over.set()
            if self._connection is not None:
                self._connection.close()


class SamplerCall:
    """Implements engine.process.client.Caller: this side calls."""

    def __init__(self, address: str, visitor: Visitor, line: SamplerLine) -> None:
        self._address, self._visitor, self._line = address, visitor, line

    def wait(self, is_over: Callable[[], bool]) -> socket.socket:
        """Waits for: a sampler that listens there and is free, within CALL_SECONDS. UserError when it refuses us."""
        end, why = time.monotonic() + CALL_SECONDS, "it was given up"
        while time.monotonic() < end and not is_over():
            try:
                return self._call()
            except (OSError, EOFError) as error:
                why = str(error)
            time.sleep(POLL_SECONDS)
        raise TimeoutError(f"{why} (nothing for {CALL_SECONDS:g} s). Start it there with `temper sampler --listen`")

    def _call(self) -> socket.socket:
        host, _, port = self._address.rpartition(":")
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS)
        try:
            introduce(connection, self._visitor.key, self._visitor.run, self._visitor.silent_seconds)
            prepare(connection, self._visitor.silent_seconds)
            self._line.begin(connection)
        except UserError as error:
            connection.close()
            raise UserError(f'cluster.samplers: "{self._address}": {error}') from error
        except BaseException:
            connection.close()
            raise
        return connection


def reach_sampler(address: str, order: str, visitor: Visitor) -> ProcessSampler:
    """The sampler at "host:port", which opens what the order says. It is stale until weights are published."""
    line = SamplerLine(address)
    return ProcessSampler(SamplerCall(address, visitor, line), SentWeights(), line, order=order)
