"""What goes out over HTTP: JSON, refusals, and the headers that keep the page to itself.

Owns: who may ask (GET, from this machine's own names), who may write a note (PUT, from its own page), and what the
browser may do with the answer.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from temper.listening import is_called_by
from temper.runs.store.nulls import finite

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_BYTES = 64_000
"""Of a note with its tags as it is sent."""
HEADERS = {
    # Charts set styles on elements and save pictures through blobs; scripts come from this server alone, without eval.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


def to_json(value: Any) -> bytes:
    """Numbers that are not finite as null: JSON has no other way to say it, and browsers refuse NaN."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(finite(value), allow_nan=False, separators=(",", ":")).encode()


async def refuse(send: Send, status: int, text: str) -> None:
    headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": to_json({"error": text})})


def why_not_written(hosts: frozenset[str] | None, headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Why a request may not write; empty when it may.

    A page of another site can make a browser send it here, but not as JSON without asking first, which nobody answers,
    and not without its own name in Origin.
    """
    given = {key: value.decode("latin-1").lower() for key, value in headers}
    if hosts is None:
        return "notes are written where the page is served to this machine alone; others can only read"
    if given.get(b"content-type", "").partition(";")[0].strip() != "application/json":
        return "notes are sent as application/json"
    if given.get(b"origin", "http://" + given[b"host"]) != "http://" + given[b"host"]:
        return "notes are written by this server's own page"
    if not given.get(b"content-length", "").isdecimal() or int(given[b"content-length"]) > MOST_BYTES:
        return f"notes have at most {MOST_BYTES} bytes, and say how many"
    return ""


class Guard:
    """Before the application: refuses what is not a plain question to this machine, and adds HEADERS to all answers."""

    def __init__(self, app: App, hosts: frozenset[str] | None) -> None:
        self._app = app
        self._hosts = hosts
        """Host names that are answered, from listening.own_names()."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        if scope["method"] not in ("GET", "PUT"):
            await refuse(guarded, 405, f"the dashboard reads, and keeps notes: GET or PUT, not {scope['method']}")
        elif not is_called_by(self._hosts, scope["headers"]):
            await refuse(guarded, 403, "this server answers only to the names of its own machine, e.g. 127.0.0.1")
        elif scope["method"] == "PUT" and (problem := why_not_written(self._hosts, scope["headers"])):
            await refuse(guarded, 403, problem)
        else:
            await self._app(scope, receive, guarded)
