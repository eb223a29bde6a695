"""HTTP/1.1 from the asking side, on asyncio streams.

Owns: connections, and bounds on what is read of an answer. Refuses: deadlines, retries, proxies, redirects. Asyncio and
not threads: a server that sends one byte a second is cut off by cancelling, wherever it waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
import threading
from collections.abc import Mapping
from urllib.parse import SplitResult


class Dialer:
    """Opens connections to one server."""

    def __init__(self, url: SplitResult, max_body_bytes: int) -> None:
        """max_body_bytes: of an answer that is read; a longer one is a ValueError."""
        self._url = url
        self._max_body_bytes = max_body_bytes
        self._trust: ssl.SSLContext | None = None
        self._lock = threading.Lock()

    async def connect(self) -> Connection:
        if self._url.scheme == "https" and self._trust is None:
            # Reading the system's certificates takes as long as a short answer, in which nobody else would be heard.
            await asyncio.to_thread(self._read_trust)
        port = self._url.port or (443 if self._trust else 80)
        streams = await asyncio.open_connection(self._url.hostname, port, ssl=self._trust)
        return Connection(*streams, self._max_body_bytes)

    def _read_trust(self) -> None:
        with self._lock:  # episodes begin together
            self._trust = self._trust or ssl.create_default_context()


class Connection:
    """One HTTP/1.1 connection, one exchange after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, max_body_bytes: int) -> None:
        self._reader = reader
        self._writer = writer
        self._max_body_bytes = max_body_bytes
        self.is_reusable = True

    async def exchange(self, request: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, headers by lower-case name, body. ValueError: what came is not HTTP, or too much; it repeats what
        came, keys included: quote() it."""
        self.is_reusable = False
        self._writer.write(request)
        await self._writer.drain()
        status, headers = await self._head()
        while 100 <= status < 200:
            status, headers = await self._head()
        has_body = status not in (204, 304)
        body = await self._body(headers) if has_body else b""
        is_delimited = not has_body or "content-length" in headers or "transfer-encoding" in headers
        self.is_reusable = is_delimited and headers.get("connection", "").lower() != "close"
        return status, headers, body

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # its loop is closed, and with it the socket
            self._writer.transport.abort()

    async def _head(self) -> tuple[int, dict[str, str]]:
        first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        match = re.fullmatch(r"HTTP/1\.[01] ([0-9]{3})(?: .*)?", first)
        if match is None:
            raise ValueError(f"not HTTP: {first}")
        fields = (line.partition(":") for line in lines if line)
        headers = {name.strip().lower(): value.strip() for name, _, value in fields}
        if first.startswith("HTTP/1.0"):
            headers.setdefault("connection", "close")
        return int(match[1]), headers

    async def _body(self, headers: Mapping[str, str]) -> bytes:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            return await self._chunks()
        if "content-length" in headers:
            return await self._reader.readexactly(self._size(headers["content-length"], 10))
        body = b""
        while piece := await self._reader.read(1 << 16):
            body += piece
            self._size(str(len(body)), 10)
        return body

    async def _chunks(self) -> bytes:
        body = b""
        while size := self._size((await self._reader.readuntil(b"\r\n")).split(b";")[0].strip().decode("latin-1"), 16):
            body += await self._reader.readexactly(size)
            self._size(str(len(body)), 10)
            await self._reader.readexactly(2)
        while await self._reader.readuntil(b"\r\n") != b"\r\n":
            pass  # trailers
        return body

    def _size(self, text: str, number_base: int) -> int:
        if not re.fullmatch(r"[0-9a-fA-F]{1,16}", text) or (size := int(text, number_base)) > self._max_body_bytes:
            raise ValueError(f"a body of {text} bytes")
        return size
