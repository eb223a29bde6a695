"""A bound socket for whoever serves over HTTP. Owns: the address. Refuses: frameworks; importing it costs nothing."""

from __future__ import annotations

import ipaddress
import socket

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
