"""A bound socket and a server for whoever serves over HTTP.

Owns: the address, and how uvicorn is set up. Refuses: applications. Importing it costs nothing.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

from temper.errors import UserError

BACKLOG = 1024


def is_public(host: str) -> bool:
    """Whether others can reach this address."""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 picks one. Bound before anything slow is loaded, so that a taken port is known at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port}: {error}. Choose another --host or --port") from error
    return bound


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
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(shutdown_seconds)),
        ws="none",
    )
    return uvicorn.Server(config)
