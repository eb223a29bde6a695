"""Numbered frames between this process and a worker with environments.

Owns: where a frame begins and ends. Refuses: what is in one. Bodies are pickles, so that everything arrives as it was
sent: a worker runs the same code that would else run here, and is trusted as much.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import cast

HEADER = struct.Struct("!QI")
"""Number of the call, bytes of the body."""
NO_CALL = 0
"""Number of frames that belong to none: the order that a worker begins with, and its signs of life."""


class Frames(asyncio.Protocol):
    """Both ends of the socket. What is sent before it is connected is sent then."""

    def __init__(self, hear: Callable[[int, bytes], None], hung_up: Callable[[], None]) -> None:
        self._hear, self._hung_up = hear, hung_up
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        self._held = bytearray()

    def send(self, number: int, body: bytes) -> None:
        frame = HEADER.pack(number, len(body)) + body
        if self._transport is None:
            self._unsent.append(frame)
        elif not self._transport.is_closing():
            self._transport.write(frame)

    def close(self) -> None:
        """At once: what is not sent yet never is."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.writelines(self._unsent)

    def data_received(self, data: bytes) -> None:
        self._held += data
        start = 0
        while len(self._held) >= (body := start + HEADER.size):
            number, size = HEADER.unpack_from(self._held, start)
            if len(self._held) < body + size:
                break
            self._hear(number, bytes(self._held[body : body + size]))
            start = body + size
        del self._held[:start]

    def connection_lost(self, error: Exception | None) -> None:
        self._hung_up()
