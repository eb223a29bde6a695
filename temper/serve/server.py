"""Listening: a socket, uvicorn, and an end that comes in time.

Owns: the address, the deadline of shutdown, closing everything. Refuses: listening beyond this machine unasked.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from temper import listening
from temper.errors import install_line
from temper.serve.app import App

LOOK_SECONDS = 0.1
GRACE_SECONDS = 15.0
"""Time for requests that were ended to be recorded and answered, before uvicorn cancels them."""


def make_server(app: App, shutdown_seconds: float) -> Any:
    """A uvicorn server that is not started. Requests in flight have `shutdown_seconds` once it is told to end."""
    missing = f"temper serve needs uvicorn. Run: {install_line('serve')}"
    return listening.make_server(app, shutdown_seconds=shutdown_seconds + GRACE_SECONDS, missing=missing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a server ends."""

    end: Callable[[], Awaitable[None]]
    """Ends what is under way and records it."""
    close: Callable[[], Awaitable[None]]
    """Lets go of everything, when nothing is under way."""
    shutdown_seconds: float
    """Time for requests in flight to end by themselves."""


async def serve(server: Any, bound: socket.socket, ending: Ending) -> None:
    """Serves until told to stop (SIGTERM, SIGINT, server.should_exit), then closes everything.

    Requests under way finish, or are ended in time and recorded as far as they got.
    """
    patience = asyncio.create_task(_end_in_time(server, ending))
    try:
        await server.serve(sockets=[bound])
        await ending.end()  # uvicorn gives up on requests when it is told twice
    finally:
        patience.cancel()
        await ending.close()


async def _end_in_time(server: Any, ending: Ending) -> None:
    """Before uvicorn cancels what is left: a request that is ended tells its client, a cancelled one breaks off."""
    while not server.should_exit:
        await asyncio.sleep(LOOK_SECONDS)
    await asyncio.sleep(ending.shutdown_seconds)
    await ending.end()


def run(server: Any, bound: socket.socket, ending: Ending) -> None:
    """Serves in this process. A shutdown that was asked for is not a failure."""

    def stop(*_: object) -> None:
        server.should_exit = True

    # uvicorn raises each signal once more when it is done: by default that would end the process or cancel the closing.
    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        asyncio.run(serve(server, bound, ending))
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
