"""Agents that run elsewhere: a service of the user's is told of each episode, and hands in its result.

Owns: what it is told, and what its answers mean. Refuses: results that are posted (serve/agents.py), retries, and
ending what it does: it is told that an episode is over, and its key opens nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult

from temper.asking.connection import Dialer
from temper.asking.quoting import quote
from temper.envs.agents.agent import RESULT_BYTES, RESULT_PATH, AgentEnd, read_result
from temper.errors import TaskError

TELL_SECONDS = 2.0
"""For telling the service that an episode is over: whether it listens changes nothing."""


class AgentService:
    """Implements rollout.agents.AgentRunner. A connection for each question, none between them."""

    def __init__(self, url: SplitResult, key: str) -> None:
        """key: what it wants to be shown; empty: nothing."""
        self._url = url
        self._key = key
        self._dialer = Dialer(url, 2 * RESULT_BYTES)
        self._unended: dict[str, str] = {}
        """By its key: what an episode is called that has been announced and has no result."""

    @property
    def keys(self) -> tuple[str, ...]:
        return (self._key,)

    async def run(self, task: Mapping[str, Any], variables: Mapping[str, str], posted: asyncio.Future[Any]) -> AgentEnd:
        """Announces one episode, and waits for its result: in the answer, or posted. Whoever calls this sets the
        deadline."""
        episode, key = uuid.uuid4().hex, variables["OPENAI_API_KEY"]
        order = {
            "episode": episode,
            "base_url": variables["OPENAI_BASE_URL"],
            "api_key": key,
            "model": variables["OPENAI_MODEL"],
            "result_url": variables["OPENAI_BASE_URL"] + RESULT_PATH,
            "task": task,
        }
        self._unended[key] = episode
        asking = asyncio.ensure_future(self._announce(order))
        try:
            await asyncio.wait((asking, posted), return_when=asyncio.FIRST_COMPLETED)
            end = None if posted.done() else asking.result()
            if end is None:
                await asyncio.wait((posted,))
        finally:
            asking.cancel()
        has_result = isinstance(posted.result(), str) if end is None else end.problem is None
        if has_result:
            del self._unended[key]
        return end or AgentEnd()

    async def tell_over(self, key: str) -> None:
        episode = self._unended.pop(key, None)
        if episode is not None:
            with contextlib.suppress(OSError, EOFError, ValueError, asyncio.LimitOverrunError, TimeoutError):
                await asyncio.wait_for(self._exchange("DELETE", f"/{episode}", b""), TELL_SECONDS)

    async def reach(self) -> None:
        """Connects and hangs up: nothing is announced. Raises OSError where nobody answers."""
        (await asyncio.wait_for(self._dialer.connect(), TELL_SECONDS)).close()

    async def close(self) -> None:
        """Nothing is held open."""

    async def _announce(self, order: Mapping[str, Any]) -> AgentEnd | None:
        """How it ended; None: its result will be posted."""
        try:
            status, body = await self._exchange("POST", "", json.dumps(order).encode())
        except (OSError, EOFError) as error:
            return self._failed(order, f"cannot be reached or hung up: {self._explain(error)}")
        except (ValueError, asyncio.LimitOverrunError) as error:
            return self._failed(order, f"does not answer in HTTP: {self._explain(error)}")
        if status == 202:
            return None
        if status != 200:
            said = body.decode(errors="replace").strip()
            return self._failed(order, f"answered with status {status}, not 200 or 202: {said}")
        try:
            return AgentEnd(result=read_result(body))
        except TaskError as error:
            return self._failed(order, f"answered with status 200 and no result: {error}")

    def _failed(self, order: Mapping[str, Any], how: str) -> AgentEnd:
        """Services repeat what they are shown in their complaints, and those are kept."""
        return AgentEnd(problem=quote(f"the agent's service {how}", (self._key, order["api_key"])))

    async def _exchange(self, method: str, below: str, body: bytes) -> tuple[int, bytes]:
        connection = await self._dialer.connect()
        try:
            status, _, answer = await connection.exchange(self._head(method, below, len(body)) + body)
        finally:
            connection.close()
        return status, answer

    def _head(self, method: str, below: str, length: int) -> bytes:
        path = self._url.path.rstrip("/") + below if below else self._url.path or "/"
        authorization = f"Authorization: Bearer {self._key}\r\n" if self._key else ""
        return (
            f"{method} {path} HTTP/1.1\r\nHost: {self._url.netloc}\r\nContent-Type: application/json\r\n"
            f"Accept: application/json\r\n{authorization}Content-Length: {length}\r\nConnection: close\r\n\r\n"
        ).encode()

    def _explain(self, error: Exception) -> str:
        return f"{self._url.netloc}: {type(error).__name__}: {error}"
