"""HTTP to one SGLang server: every call has a deadline, every failure names the address.

Owns: connections, deadlines, retries, the error a status becomes. Refuses: repeating a call that may have been heard.
A server that is gone, silent or broken is SamplerLost; one that answers what it should not, BackendError.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from temper.engine.fleet.member import SamplerLost
from temper.errors import BackendError, TaskError, UserError, install_line

if TYPE_CHECKING:
    import httpx

ATTEMPTS = 4
FIRST_PAUSE_SECONDS = 0.1
CONNECT_SECONDS = 10.0
SERVER_ERROR = 500
"""Statuses from here on say that the server is broken, and not the request."""
MAX_QUOTED = 300
"""Characters of a server's answer in an error: it is data from outside."""

Body = Mapping[str, Any]


@asynccontextmanager
async def within(seconds: float, complaint: str) -> AsyncIterator[None]:
    """A deadline that says what was not done."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise SamplerLost(f"{complaint} within {seconds:g} s") from error


class SglangClient:
    def __init__(self, address: str, *, api_key: str, idle_seconds: float) -> None:
        try:
            import httpx
        except ImportError as error:
            raise UserError(f'engine.kind "sglang" needs httpx. Run: {install_line("sglang")}') from error
        self.address = address.rstrip("/")
        self._idle_seconds = idle_seconds
        # Not the environment's proxies: prompts would leave by a way that no setting of the run mentions.
        self._http = httpx.AsyncClient(
            base_url=self.address,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(idle_seconds, connect=CONNECT_SECONDS, pool=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        )

    async def get(self, path: str, *, seconds: float) -> Any:
        """JSON of a GET, repeated when the connection breaks: reading twice changes nothing."""
        return self._parse(path, (await self._call("GET", path, None, seconds, is_repeatable=True)).text)

    async def post(self, path: str, body: Body, *, seconds: float) -> Any:
        """JSON of a POST, '' when the answer has none. Repeated only when no connection was made."""
        answer = await self._call("POST", path, body, seconds, is_repeatable=False)
        return self._parse(path, answer.text) if "json" in answer.headers.get("content-type", "") else ""

    async def stream(self, path: str, body: Body) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streamed answer. A stream that ends without its end mark was cut, and says so."""
        import httpx

        self._require_open()
        for attempt in range(ATTEMPTS):
            try:
                async with self._http.stream("POST", path, json=body) as answer:
                    if answer.status_code >= 400:
                        await answer.aread()
                        self._refuse(path, answer)
                    async for event in self._events(path, answer):
                        yield event
                    return
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                await self._pause_or_raise(path, error, attempt)
            except httpx.TimeoutException as error:
                raise SamplerLost(f"{self._who(path)} sent nothing for {self._idle_seconds:g} s: {error!r}") from error
            except httpx.TransportError as error:
                raise SamplerLost(f"{self._who(path)} dropped the connection in mid-answer: {error!r}") from error

    async def close(self) -> None:
        """Ends what is being streamed, too."""
        await self._http.aclose()

    async def _events(self, path: str, answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
        async for line in answer.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            event = self._parse(path, data)
            if error := event.get("error"):
                self._raise_refusal(path, int(error.get("code", 500)), str(error.get("message", error)))
            yield event
        raise SamplerLost(f"{self._who(path)} dropped the connection in mid-answer: no end mark came")

    async def _call(
        self, method: str, path: str, body: Body | None, seconds: float, *, is_repeatable: bool
    ) -> httpx.Response:
        import httpx

        self._require_open()
        for attempt in range(ATTEMPTS):
            try:
                async with within(seconds, f"{self._who(path)} did not answer"):
                    answer = await self._http.request(method, path, json=body)
            except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
                raise SamplerLost(f"{self._who(path)} did not answer within {seconds:g} s") from error
            except httpx.TransportError as error:
                was_unheard = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
                if not (was_unheard or is_repeatable):
                    raise SamplerLost(f"{self._who(path)} dropped the connection: {error!r}") from error
                await self._pause_or_raise(path, error, attempt)
                continue
            if answer.status_code >= 400:
                self._refuse(path, answer)
            return answer
        raise AssertionError("the last attempt returns or raises")

    def _require_open(self) -> None:
        if self._http.is_closed:
            raise SamplerLost(f"SGLang at {self.address} was closed")

    async def _pause_or_raise(self, path: str, error: Exception, attempt: int) -> None:
        self._require_open()
        if attempt == ATTEMPTS - 1:
            raise SamplerLost(
                f"{self._who(path)} cannot be reached, after {ATTEMPTS} attempts: {error!r}. Is the server running?"
            ) from error
        await asyncio.sleep(FIRST_PAUSE_SECONDS * 2**attempt)

    def _refuse(self, path: str, answer: httpx.Response) -> None:
        self._raise_refusal(path, answer.status_code, answer.text)

    def _raise_refusal(self, path: str, status: int, message: str) -> None:
        """One request that the server finds wrong is that task's failure; everything else is the server's."""
        told = f"{self._who(path)} refused ({status}): {message[:MAX_QUOTED]}"
        if status >= SERVER_ERROR:
            raise SamplerLost(told)
        raise TaskError(told) if status == 400 and path == "/generate" else BackendError(told)

    def _who(self, path: str) -> str:
        return f"SGLang at {self.address}{path}"

    def _parse(self, path: str, text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError as error:
            raise BackendError(f"{self._who(path)} answered what is no JSON: {text[:MAX_QUOTED]!r}") from error
