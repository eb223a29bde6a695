"""Sampler processes of other machines: they call back, and are then asked like those of this one.

Owns: the connection and who may make it. Refuses: starting them (cluster/ray.py), what they open and draw.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import time

from temper.cluster.sampler_main import open_sampler
from temper.engine.process.server import serve
from temper.engine.process.weights import SharedWeights, anonymous_file

CALL_SECONDS = 300.0
"""For a process on another machine to start and call back."""
TOKEN_BYTES = 32


class Callback:
    """Where one sampler process is waited for. Whoever else calls is turned away."""

    def __init__(self) -> None:
        self._server = socket.create_server(("", 0))
        self.port: int = self._server.getsockname()[1]
        self.token = secrets.token_hex(TOKEN_BYTES // 2)

    def wait(self) -> socket.socket:
        """Waits for: the process that has the token, within CALL_SECONDS. OSError when it does not come."""
        end = time.monotonic() + CALL_SECONDS
        try:
            while (left := end - time.monotonic()) > 0:
                self._server.settimeout(left)
                caller, _ = self._server.accept()
                if self._is_expected(caller):
                    caller.settimeout(None)
                    caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    return caller
                caller.close()
        finally:
            self._server.close()
        raise TimeoutError(f"nothing for {CALL_SECONDS:g} s")

    def _is_expected(self, caller: socket.socket) -> bool:
        caller.settimeout(10.0)
        said = b""
        try:
            while len(said) < TOKEN_BYTES and (part := caller.recv(TOKEN_BYTES - len(said))):
                said += part
        except OSError:
            return False
        return hmac.compare_digest(said, self.token.encode())


def serve_caller(host: str, port: int, token: str) -> None:
    """The main of a sampler process that some other machine waits for: calls there, and serves until that hangs up."""
    connection = socket.create_connection((host, port), timeout=CALL_SECONDS)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(token.encode())
    asyncio.run(serve(connection, SharedWeights(anonymous_file()), open_sampler))
