"""Addresses of agents that run elsewhere: where they are asked to play, and where they find the model.

Owns: the options url, listen and address, and which of them cannot work together. Refuses: opening anything.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from temper.errors import UserError
from temper.listening import is_public, split_address

OWN = "127.0.0.1:0"
"""This machine alone, at a port that is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAddresses:
    """Who reaches whom."""

    service: SplitResult | None
    """Where each episode is announced; None: Temper starts its agents."""
    host: str
    """Where agents find the model: the name or number that is listened at."""
    port: int
    """0: any that is free."""
    told: str
    """The same as others call it; empty: as it is listened at."""


def read_addresses(where: str, url: str, listen: str, address: str) -> AgentAddresses:
    """where: what a UserError begins with."""
    host, port = split_address(listen, f"{where}: listen")
    service = _read_url(f"{where}: url", url) if url else None
    if address:
        _read_url(f"{where}: address", address)
        if not port:
            raise UserError(f"{where}: address={address!r} needs a port that stays. Name it, e.g. listen = "
                            f'"{host}:8765"')  # fmt: skip
    elif _is_every_address(host):
        raise UserError(
            f"{where}: listen={listen!r} is every address of this machine, and agents need one that they can call. "
            f'Say which, e.g. address = "http://{socket.gethostname()}:{port or 8765}"'
        )
    elif service is not None and is_public(service.hostname or "") and not is_public(host):
        raise UserError(
            f"{where}: the service at {service.hostname} cannot reach listen={listen!r}, which is for this machine "
            f'alone. Give e.g. listen = "0.0.0.0:8765" and address = "http://{socket.gethostname()}:8765"'
        )
    return AgentAddresses(service=service, host=host, port=port, told=address.rstrip("/"))


def _read_url(what: str, text: str) -> SplitResult:
    try:
        url = urlsplit(text)
        is_whole = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # a port that is no number, brackets without an end
        is_whole = False
    if not is_whole or not text.isascii() or not text.isprintable() or " " in text:
        raise UserError(f'{what}={text!r} is no address. Write e.g. "http://agent-host:9000/episodes"')
    if url.username or url.password or url.query or url.fragment:
        raise UserError(
            f"{what} holds credentials, a query or a fragment. A key that the service wants stands in an environment "
            "variable, which options.key_variable names"
        )
    return url


def _is_every_address(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
