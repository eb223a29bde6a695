"""Sampler processes of other machines: they call back, and are then asked like those of this one.

Owns: the connection and who may make it. Refuses: starting them (cluster/ray.py), what they open and draw.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from temper.cluster.sampler_main import open_sampler
from temper.engine.process.server import serve
from temper.engine.process.weights import SharedWeights, anonymous_file

CALL_SECONDS = 300.0
"""For a process on another machine to start and call back."""
POLL_SECONDS = 1.0
"""Between two looks whether who was to call has ended."""
TOKEN_BYTES = 32


class Callback:
    """Where one sampler process is waited for. Whoever else calls is turned away."""

    def __init__(self, silent_seconds: float, lacks: Callable[[], str] = lambda: "") -> None:
        """lacks: why one may not have come, for an error."""
        self._server, self._silent_seconds, self._lacks = socket.create_server(("", 0)), silent_seconds, lacks
        self.port: int = self._server.getsockname()[1]
        self.token = secrets.token_hex(TOKEN_BYTES // 2)

    def wait(self, is_over: Callable[[], bool]) -> socket.socket:
        """Waits for: the process that has the token, within CALL_SECONDS. OSError when it does not come, or when it is
        over before."""
        end = time.monotonic() + CALL_SECONDS
        self._server.settimeout(POLL_SECONDS)
        with self._server:
            while time.monotonic() < end and not is_over():
                with suppress(TimeoutError):
                    caller, _ = self._server.accept()
                    if self._is_expected(caller):
                        prepare(caller, self._silent_seconds)
                        return caller
                    caller.close()
        if is_over():
            raise TimeoutError("it was given up")
        raise TimeoutError(f"nothing for {CALL_SECONDS:g} s{self._lacks()}")

    def _is_expected(self, caller: socket.socket) -> bool:
        caller.settimeout(10.0)
        said = b""
        try:
            while len(said) < TOKEN_BYTES and (part := caller.recv(TOKEN_BYTES - len(said))):
                said += part
        except OSError:
            return False
        return hmac.compare_digest(said, self.token.encode())


def prepare(connection: socket.socket, silent_seconds: float) -> None:
    """Small frames go at once, and a machine of which nothing comes for so long is gone: a network that is cut says no
    word about it, and without this either side would wait for ever. The kernel of a busy machine still answers."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        quarter = max(1, int(silent_seconds / 4))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2 * quarter)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, quarter)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * silent_seconds))


def serve_caller(host: str, port: int, token: str, silent_seconds: float) -> None:
    """The main of a sampler process that some other machine waits for: calls there, and serves until that hangs up, or
    cannot be reached for silent_seconds."""
    connection = socket.create_connection((host, port), timeout=CALL_SECONDS)
    prepare(connection, silent_seconds)
    connection.sendall(token.encode())
    asyncio.run(serve(connection, SharedWeights(anonymous_file()), open_sampler))
