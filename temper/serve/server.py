"""Listening: a socket, uvicorn, and an end that comes in time.

Owns: the address, the deadline of shutdown, closing everything. Refuses: listening beyond this machine unasked.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from temper import listening
from temper.serve.app import App

INSTALL = 'pip install "temper-rl[serve]"'


def make_server(app: App, shutdown_seconds: float) -> Any:
    """A uvicorn server that is not started. Requests in flight have `shutdown_seconds` once it is told to end."""
    return listening.make_server(
        app, shutdown_seconds=shutdown_seconds, missing=f"temper serve needs uvicorn: {INSTALL}"
    )


async def serve(server: Any, bound: socket.socket, close: Callable[[], Awaitable[None]]) -> None:
    """Serves until told to stop (SIGTERM, SIGINT, server.should_exit), then closes everything."""
    try:
        await server.serve(sockets=[bound])
    finally:
        await close()


def run(server: Any, bound: socket.socket, close: Callable[[], Awaitable[None]]) -> None:
    """Serves in this process. A shutdown that was asked for is no failure."""
    # uvicorn raises the signal once more when it is done; by default that would end the process as if it had crashed.
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        asyncio.run(serve(server, bound, close))
    except KeyboardInterrupt:
        return
    finally:
        signal.signal(signal.SIGTERM, previous)
