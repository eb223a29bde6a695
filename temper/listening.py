"""A bound socket and a server for whoever serves over HTTP.

Owns: the address, how uvicorn is set up, which names it answers to, and clients that hold a connection and ask nothing.
Refuses: applications. Importing it costs nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import resource
import socket
from collections.abc import Iterable
from typing import Any

from temper.errors import UserError

BACKLOG = 1024
HEADER_SECONDS = 10.0
"""For the head of a request to arrive whole, from the connection or from its first byte after an earlier request."""
FLUSH_SECONDS = 20.0
"""For a client to take the rest of an answer after which its connection is closed."""
MOST_CONNECTIONS = 512
LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})


def is_public(host: str) -> bool:
    """Whether others can reach this address."""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def split_address(text: str, what: str) -> tuple[str, int]:
    """Host and port of "0.0.0.0:8765" or "[::1]:8765". what: the name of the setting, for a UserError."""
    host, sign, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if is_bracketed:
        host = host[1:-1]
    is_port = port.isascii() and port.isdigit() and int(port) < 1 << 16
    if not sign or not host or not is_port or (":" in host) != is_bracketed:
        raise UserError(f'{what}={text!r} is no address and port. Write e.g. "0.0.0.0:8765"')
    return host, int(port)


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 picks one. Bound before anything slow is loaded, so that a taken port is known at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port}: {error}. Choose another address or port") from error
    return bound


def listen_at(path: str) -> socket.socket:
    """A bound socket in the file system, in a folder of the caller's own."""
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(path)
    bound.listen(BACKLOG)
    return bound


def own_names(host: str) -> frozenset[str] | None:
    """Names by which a server on this address may be called. A page of another site that has its own name point here
    (DNS rebinding) sends that name. None: it listens to the network and cannot know its names."""
    if is_public(host):
        return None
    return LOOPBACK_NAMES | {f"[{host.lower()}]" if ":" in host else host.lower()}


def is_called_by(names: frozenset[str] | None, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the Host of a request is one of the names; it must have one, and only such."""
    called = [_name(value.decode("latin-1")) for key, value in headers if key == b"host"]
    return names is None or (bool(called) and names.issuperset(called))


def _name(host: str) -> str:
    """The host of "name:port" or "[::1]:port"."""
    host = host.strip().lower()
    return host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]


def most_connections() -> int:
    """Half of the descriptors that this process may have: the other half is for files, and for accepting at all."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if limit == resource.RLIM_INFINITY else max(8, min(MOST_CONNECTIONS, limit // 2))


def make_server(app: Any, *, shutdown_seconds: float, missing: str) -> Any:
    """A uvicorn server that is not started. Requests in flight have `shutdown_seconds` once it is told to end.

    `missing`: what to say when there is no uvicorn.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise UserError(missing) from error
    config = uvicorn.Config(
        app,
        http=_bounded_protocol(),
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(shutdown_seconds)),
        ws="none",
    )
    return uvicorn.Server(config)


class _Patience:
    """With one connection: how long it may go without a whole question."""

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether no request is being answered."""
        cycle = self._protocol.cycle
        return cycle is None or cycle.response_complete

    @property
    def until(self) -> float:
        """When it ends. 0 of a connection that was answered and is only kept."""
        return 0.0 if self._timer is None else self._timer.when()

    def look(self) -> None:
        """Something has come, or the connection has."""
        if not self.is_waiting:
            self.stop()
        elif self._timer is None:
            self._timer = self._protocol.loop.call_later(HEADER_SECONDS, self._give_up)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if self.is_waiting:
            self._protocol.transport.abort()


def _bounded_protocol() -> Any:
    """uvicorn's protocol with bounds on what clients may hold. h11, which also bounds the size of a head.

    uvicorn 0.54 waits for ever for a head that does not come, and takes connections until there are no descriptors
    left: then nobody gets in.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class BoundedProtocol(H11Protocol):
        patience: _Patience

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.patience = _Patience(self)
            self.patience.look()
            if len(self.connections) > most_connections():
                _make_room(self, self.connections)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.patience.look()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self.patience.stop()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.transport.is_closing():
                self.loop.call_later(FLUSH_SECONDS, self.transport.abort)

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self.loop.call_later(FLUSH_SECONDS, self.transport.abort)

    return BoundedProtocol


def _make_room(newcomer: Any, connections: Iterable[Any]) -> None:
    """Ends the connection that has asked nothing for the longest time, or the newcomer when all are at work."""
    others = [other for other in connections if other is not newcomer and not other.transport.is_closing()]
    waiting = [other for other in others if other.patience.is_waiting]
    min(waiting, key=lambda other: other.patience.until, default=newcomer).transport.abort()
