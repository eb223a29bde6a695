"""The HTTP face: an ASGI application that reads, checks, answers, streams, and notices when a client has gone.

Owns: routes, the key, limits on bodies and on patience. Refuses: frameworks; theirs answer 422 in shapes of their own,
and none has a deadline for a reader that stopped reading.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from temper.listening import is_called_by
from temper.serve.answers import Shape, event, to_json
from temper.serve.asked import ENDPOINTS
from temper.serve.gateway import Exchange, Gateway
from temper.serve.refusals import Refused, refusal_of

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
log = logging.getLogger("temper.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    api_key: str = ""
    """Empty: everybody may ask."""
    hosts: frozenset[str] | None = None
    """Host names that are answered, from listening.own_names(): a page of another site calls by another name."""
    max_body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    """Time for a body to arrive."""
    send_seconds: float = 60.0
    """Time for a client to take what it is sent; then it is dropped."""
    request_seconds: float = 3600.0
    """Time for a whole response."""
    session: str = ""
    """The session of every request; empty: the one that its header names."""


class ClientGone(Exception):
    """The other side has closed the connection, or stopped reading."""


Route = Callable[["HttpClient"], Awaitable[None]]
"""Answers one request."""
NO_ROUTES: Mapping[str, Route] = {}


class App:
    """Implements the ASGI interface for HTTP."""

    def __init__(self, gateway: Gateway, settings: HttpSettings, routes: Mapping[str, Route] = NO_ROUTES) -> None:
        """routes: what else is answered to a POST by whoever has the key, by path."""
        self._routes = routes
        self._gateway = gateway
        self._settings = settings
        self._started = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"this server speaks HTTP only, not {scope['type']}")
        client = HttpClient(scope, receive, send, self._settings)
        try:
            await self._respond(client)
        except ClientGone:
            return
        except asyncio.CancelledError:  # the server ends, and what was drawn is recorded: no failure to log
            with contextlib.suppress(ClientGone):
                await client.refuse(Refused("the server is shutting down", status=503, kind="server_error"))
        except Exception as error:
            refusal = refusal_of(error)
            if not isinstance(error, Refused) and refusal.status >= 500:
                log.error("%s failed", client.path, exc_info=error)
            with contextlib.suppress(ClientGone):
                await client.refuse(refusal)

    async def _respond(self, client: HttpClient) -> None:
        path, method = client.path, client.method
        if not is_called_by(self._settings.hosts, client.headers):
            raise Refused(
                "this server answers only to the names of its own machine, e.g. 127.0.0.1",
                status=403,
                code="wrong_host",
            )
        if path == "/health" and method == "GET":  # open to all: whoever watches the process has no key
            is_well = self._gateway.failure is None
            return await client.send_json(200 if is_well else 503, {"status": "ok" if is_well else "failed"})
        self._require_key(client)
        route = self._complete if path in ENDPOINTS else self._routes.get(path)
        wanted = "GET" if route is None else "POST"
        is_model = path == "/v1/models" or path.startswith("/v1/models/")
        if route is None and path != "/metrics" and not is_model:
            raise Refused(f"there is nothing at {path}", status=404, code="not_found")
        if method != wanted:
            raise Refused(f"{path} takes {wanted}, not {method}", status=405, code="method_not_allowed")
        if route is not None:
            return await route(client)
        if is_model:
            return await client.send_json(200, self._models(path.removeprefix("/v1/models").strip("/")))
        text = prometheus_text(self._gateway.metrics())
        return await client.send_whole(200, text.encode(), b"text/plain; version=0.0.4; charset=utf-8")

    async def _complete(self, client: HttpClient) -> None:
        """Draws and answers, unless the client goes first."""
        body = await client.body()
        await self._unless_gone(client, self._respond_to(client, body))

    async def _unless_gone(self, client: HttpClient, response: Coroutine[Any, Any, None]) -> None:
        work, gone = asyncio.create_task(response), asyncio.create_task(client.gone())
        try:
            done, _ = await asyncio.wait(
                (work, gone), timeout=self._settings.request_seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait((work,), timeout=self._settings.send_seconds)  # it records what was drawn
        if not done:
            raise Refused("the response took too long", status=504, kind="server_error", code="timeout")
        if work not in done:
            raise ClientGone
        await work

    async def _respond_to(self, client: HttpClient, body: bytes) -> None:
        exchange = await self._gateway.open(client.path, body, self._settings.session or client.session)
        try:
            if exchange.asked.is_streamed:
                return await self._stream(client, exchange)
            return await client.send_json(200, await self._gateway.answer(exchange))
        finally:
            self._gateway.close(exchange)

    async def _stream(self, client: HttpClient, exchange: Exchange) -> None:
        await client.start(200, b"text/event-stream; charset=utf-8", {b"cache-control": b"no-cache"})
        async with contextlib.aclosing(self._gateway.events(exchange)) as events:  # type: ignore[type-var]
            try:
                async for part in events:
                    await client.send_part(part)
            except ClientGone:
                raise
            except Exception as error:  # the status is sent already: the error is the last event, and no [DONE] follows
                refusal = refusal_of(error)
                if not isinstance(error, Refused):
                    log.error("a stream failed", exc_info=error)
                await client.send_part(event(refusal.body))
        await client.send_part(b"", is_last=True)

    def _models(self, name: str) -> Shape:
        own = self._gateway.limits.model or name or "policy"
        model = {
            "id": own,
            "object": "model",
            "created": self._started,
            "owned_by": "temper",
            "max_model_len": self._gateway.limits.max_length,
        }
        if name in ("", own):
            return model if name else {"object": "list", "data": [model]}
        raise Refused(f'the model "{name}" is not here', status=404, param="model", code="model_not_found")

    def _require_key(self, client: HttpClient) -> None:
        if not self._settings.api_key:
            return
        kind, _, key = client.header(b"authorization").partition(b" ")
        # Compared in constant time: how long it takes must not tell how much of a guess was right.
        is_right = hmac.compare_digest(key.strip(), self._settings.api_key.encode())
        if kind.lower() != b"bearer" or not is_right:
            raise Refused("the API key is missing or wrong", status=401, code="invalid_api_key")


class HttpClient:
    """One HTTP request from the other side's point of view."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, settings: HttpSettings) -> None:
        self.path: str = scope["path"]
        self.method: str = scope["method"]
        self.headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        self._receive = receive
        self._send = send
        self._settings = settings
        self._is_started = False

    def header(self, name: bytes) -> bytes:
        return dict(self.headers).get(name, b"")

    @property
    def session(self) -> str:
        """The session that the header names, or ''."""
        return self.header(b"x-temper-session").decode("utf-8", "replace")

    async def body(self) -> bytes:
        kind = self.header(b"content-type").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            # A page in a browser can send any other type to this address without asking anybody.
            raise Refused("send the header Content-Type: application/json", status=415, code="unsupported_media_type")
        announced = self.header(b"content-length")
        self._require_size(int(announced) if announced.isdigit() else 0)
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._settings.body_seconds):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    self._require_size(size)
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise Refused("the body did not arrive in time", status=408, code="request_timeout") from None

    async def gone(self) -> None:
        """Returns when the client has closed the connection. Whoever calls this sets the deadline."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def send_json(self, status: int, shape: Mapping[str, Any]) -> None:
        await self.send_whole(status, to_json(dict(shape)), b"application/json")

    async def send_whole(
        self, status: int, body: bytes, content_type: bytes, headers: Mapping[bytes, bytes] | None = None
    ) -> None:
        await self.start(status, content_type, {b"content-length": str(len(body)).encode(), **(headers or {})})
        await self.send_part(body, is_last=True)

    async def refuse(self, refusal: Refused) -> None:
        if self._is_started:  # the rest of a broken stream cannot be mended
            return
        extra = {401: {b"www-authenticate": b"Bearer"}, 429: {b"retry-after": b"1"}}.get(refusal.status, {})
        if refusal.status in (408, 413, 415):
            extra = {b"connection": b"close"}  # the body was not read to its end
        await self.send_whole(refusal.status, to_json(refusal.body), b"application/json", extra)

    async def start(self, status: int, content_type: bytes, headers: Mapping[bytes, bytes]) -> None:
        self._is_started = True
        listed = [(b"content-type", content_type), *headers.items()]
        await self._deliver({"type": "http.response.start", "status": status, "headers": listed})

    async def send_part(self, body: bytes, *, is_last: bool = False) -> None:
        await self._deliver({"type": "http.response.body", "body": body, "more_body": not is_last})

    async def _deliver(self, message: MutableMapping[str, Any]) -> None:
        """Waits while the client's buffer is full, but not for ever."""
        try:
            async with asyncio.timeout(self._settings.send_seconds):
                await self._send(message)
        except (TimeoutError, OSError) as error:
            raise ClientGone from error

    def _require_size(self, size: int) -> None:
        if size > self._settings.max_body_bytes:
            raise Refused(
                f"the body has more than {self._settings.max_body_bytes} bytes", status=413, code="body_too_large"
            )


def prometheus_text(values: Mapping[str, float]) -> str:
    """The text format: totals are counters, everything else a gauge."""
    lines = []
    for name, value in sorted(values.items()):
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# TYPE {name} {kind}", f"{name} {value:.10g}"]
    return "\n".join(lines) + "\n"
