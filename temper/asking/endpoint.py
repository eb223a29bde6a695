"""A client for any server that speaks the OpenAI chat-completions protocol.

Owns: idle connections, the deadline, retries, and what counts as an answer. Refuses: HTTP itself (connection.py), keys
in recipes, proxies, streaming, judging.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import SplitResult, urlsplit

from temper.asking.connection import Connection, Dialer
from temper.asking.quoting import quote
from temper.errors import TaskError, UserError
from temper.types import Message

MAX_BODY_BYTES = 8 << 20
"""Largest answer that is read; a longer one is not a verdict."""
MAX_BACKOFF_SECONDS = 30.0
FLAKY_STATUSES = (408, 425, 429)
"""With every 5xx: worth asking again."""


class EndpointFailed(TaskError):
    """The endpoint gave no answer: unreachable, refused, too slow or broken. Becomes Score.error, never a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointOptions:
    """Where a model is asked, and how patiently."""

    base_url: str
    """Up to and without "/chat/completions", e.g. "http://127.0.0.1:8000/v1"."""
    model: str
    key_variable: str = ""
    """Name of the environment variable that holds the key; empty: no key is sent."""
    max_concurrent: int = 8
    """Requests under way at one time; further ones wait."""
    deadline_seconds: float = 60.0
    """Deadline of one question with all its retries, counted from when it may be sent."""
    retries: int = 3
    """After a refused or lost connection, status 429 or 5xx, or an answer that is not in the protocol."""
    backoff_seconds: float = 0.5
    """Before the first retry; doubles with each, unless the server names a time."""

    def __post_init__(self) -> None:
        url = urlsplit(self.base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise UserError(
                f'base_url="{self.base_url}" is no address. Write e.g. base_url = "http://127.0.0.1:8000/v1"'
            )
        if url.username or url.password or url.query:
            raise UserError("base_url holds credentials or a query. Put the key into an environment variable and name "
                            "it in key_variable.")  # fmt: skip
        if not self.model:
            raise UserError('model is empty. Name the model that the endpoint serves, e.g. model = "judge"')
        if self.max_concurrent < 1 or self.retries < 0 or self.deadline_seconds <= 0 or self.backoff_seconds < 0:
            raise UserError(
                f"max_concurrent={self.max_concurrent} must be at least 1, retries={self.retries} and "
                f"backoff_seconds={self.backoff_seconds} at least 0, deadline_seconds={self.deadline_seconds} above 0."
            )
        read_key(self.key_variable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the model said, and as which model the server signed it."""

    text: str
    model: str
    is_cut: bool = False
    """It ended at the limit on tokens, and not where the model ended it."""


def read_key(variable: str) -> str:
    """The key, '' when no variable is named. A value that is not a variable name may be the key: never shown."""
    if not variable:
        return ""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
        raise UserError("key_variable must be the name of an environment variable, e.g. OPENAI_API_KEY, not the key.")
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(f"key_variable names {variable}, which is not set. Run: export {variable}=...")
    if not key.isascii() or not key.isprintable():
        raise UserError(f"the environment variable {variable} holds characters that no key has.")
    return key


class Endpoint:
    """Keeps its connections open between questions. Belongs to one event loop at a time."""

    def __init__(self, options: EndpointOptions, *, key: str = "") -> None:
        """key: of a server that Temper itself has started; others' keys stand in variables."""
        self.options = options
        self._key = key or read_key(options.key_variable)
        self._url: SplitResult = urlsplit(options.base_url)
        self._dialer = Dialer(self._url, MAX_BODY_BYTES)
        self._idle: list[Connection] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(options.max_concurrent)

    async def ask(self, messages: Sequence[Message], decoding: Mapping[str, float]) -> Reply:
        """The model's answer; `decoding` is sent as it is, e.g. temperature. Raises EndpointFailed with the reason."""
        question = {"model": self.options.model, "messages": [m.as_dict() for m in messages], **decoding}
        return read_reply(await self.complete(json.dumps(question).encode()))

    async def complete(self, body: bytes) -> bytes:
        """The chat completion that answers a request as it is, in the server's own words. Raises EndpointFailed."""
        self._enter_loop()
        async with self._slots:
            tried = _Tries()
            try:
                async with asyncio.timeout(self.options.deadline_seconds):
                    return await self._until_answered(body, tried)
            except TimeoutError as error:
                seen = f" (before that: {tried.last})" if tried.last else ""
                raise EndpointFailed(f"timeout after {self.options.deadline_seconds:g} s{seen}") from error

    async def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _enter_loop(self) -> None:
        """Connections of a loop that is gone can be neither used nor awaited."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._idle.clear()
            self._slots = asyncio.Semaphore(self.options.max_concurrent)
            self._loop = loop

    async def _until_answered(self, body: bytes, tried: _Tries) -> bytes:
        while True:
            was_reused = bool(self._idle)
            try:
                return await self._attempt(body)
            except _Flaky as failure:
                tried.last = str(failure)
                if was_reused and failure.is_connection:
                    continue  # the server had hung up on an idle connection: not the fault of this question
                if tried.count >= self.options.retries:
                    raise EndpointFailed(f"{failure} (after {tried.count + 1} attempts)") from failure
                pause = self.options.backoff_seconds * 2**tried.count
                tried.count += 1
                await asyncio.sleep(failure.pause_seconds or min(pause, MAX_BACKOFF_SECONDS))

    async def _attempt(self, body: bytes) -> bytes:
        try:
            status, headers, answer = await self._exchange(self._head(len(body)) + body)
        except (OSError, EOFError) as error:
            raise _Flaky(f"{type(error).__name__}: {error}", is_connection=True) from error
        except (ValueError, asyncio.LimitOverrunError) as error:
            raise _Flaky(quote(f"broken HTTP: {error}", (self._key,), 200)) from error
        if self._key:  # servers repeat it in their complaints, and those are kept
            answer = answer.replace(self._key.encode(), b"[key]")
        if status != 200:
            _refuse(status, headers, answer)
        read_reply(answer)  # what is no chat completion is worth another attempt
        return answer

    async def _exchange(self, request: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = self._idle.pop() if self._idle else await self._dialer.connect()
        try:
            answer = await connection.exchange(request)
        except BaseException:  # also when cancelled: the rest of this answer must not be read as the next one
            connection.close()
            raise
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    def _head(self, length: int) -> bytes:
        authorization = f"Authorization: Bearer {self._key}\r\n" if self._key else ""
        return (
            f"POST {self._url.path.rstrip('/')}/chat/completions HTTP/1.1\r\nHost: {self._url.netloc}\r\n"
            f"Content-Type: application/json\r\nAccept: application/json\r\n{authorization}"
            f"Content-Length: {length}\r\n\r\n"
        ).encode()


class _Tries:
    """Survives the cancelling by a deadline, so that its message can say what had gone wrong before."""

    count = 0
    last = ""


class _Flaky(Exception):
    """Worth another attempt."""

    def __init__(self, reason: str, *, pause_seconds: float = 0.0, is_connection: bool = False) -> None:
        super().__init__(reason)
        self.pause_seconds = pause_seconds
        self.is_connection = is_connection


def _refuse(status: int, headers: Mapping[str, str], answer: bytes) -> NoReturn:
    reason = f"status {status}: {answer[:200].decode(errors='replace').strip()}"
    if status < 500 and status not in FLAKY_STATUSES:
        raise EndpointFailed(reason)
    wanted = headers.get("retry-after", "")
    pause = min(float(wanted), MAX_BACKOFF_SECONDS) if re.fullmatch(r"[0-9]{1,6}(\.[0-9]+)?", wanted) else 0.0
    raise _Flaky(reason, pause_seconds=pause)


def read_reply(answer: bytes) -> Reply:
    """The first choice. Null content, as of a refusal, is an empty text: the model did answer."""
    try:
        body: Any = json.loads(answer)
        content = body["choices"][0]["message"]["content"]
        is_cut = body["choices"][0].get("finish_reason") == "length"
        signed = body.get("model") or ""
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise _Flaky(f"no chat completion in the answer {answer[:80]!r}") from error
    if not isinstance(content, str | None) or not isinstance(signed, str):
        raise _Flaky(f"no text in the answer {answer[:80]!r}")
    return Reply(text=content or "", model=signed, is_cut=is_cut)
