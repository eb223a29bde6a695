"""The program of a worker process: environments live here, an episode's whole life, and answer over a socket.

Owns: deadlines of calls here, signs of life, what their exceptions become on the way. Refuses: importing torch; a
worker must start fast and stay small.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import sys
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

from temper import calls
from temper.calls import DeadlinePassed, explain_error, is_end_of_task
from temper.children import die_with_parent, take_over_stdin
from temper.envs.env import find_env, limit_cost
from temper.envs.processes.frames import NO_CALL, Frames
from temper.errors import BackendError, ContextFull, TaskError, TemperError, UserError
from temper.protocols import Env, EnvOpening, EnvReply
from temper.types import Event

LIFE_SECONDS = 1.0
"""Between two signs of life; less where the deadline of a call is short."""
MAX_BYTES = 64 * 2**20
"""Of one answer."""
MEANT = (BackendError, UserError, ContextFull, DeadlinePassed)
"""What episodes tell apart. All else that an environment raises is one failed episode."""


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    calls.run(EnvServer().serve(take_over_stdin()))


class EnvServer:
    """Holds environments by the number of their episode, and answers until the socket is closed."""

    def __init__(self) -> None:
        self._frames = Frames(self._hear, self._hang_up)
        self._envs: dict[int, Env] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._find: Callable[[str], Callable[[], Env]]
        self._seconds = self._max_cost = 0.0

    async def serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        await loop.create_connection(lambda: self._frames, sock=connection)
        while not self._over.done():
            if self._seconds:  # the order has come
                self._tell_of_life()
            await asyncio.wait({self._over}, timeout=min(LIFE_SECONDS, self._seconds / 4 or LIFE_SECONDS))

    def _hang_up(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _tell_of_life(self) -> None:
        self._frames.send(NO_CALL, b"")

    def _hear(self, number: int, body: bytes) -> None:
        if number == NO_CALL:
            options, allowed, self._seconds, self._max_cost = pickle.loads(body)
            self._find = cache(lambda name: find_env(name, options, allowed=allowed))
            self._tell_of_life()
            return
        verb, *given = pickle.loads(body)
        if verb == "cancel":
            if (task := self._calls.get(given[0])) is not None:
                task.cancel()
            return
        self._calls[number] = task = asyncio.create_task(self._answer(number, verb, *given))
        task.add_done_callback(lambda _: self._calls.pop(number, None))

    async def _answer(self, number: int, verb: str, episode: int, *given: Any) -> None:
        try:
            body = _packed(await self._call(verb, episode, *given), verb)
        except BaseException as error:  # the rim: environments are user code
            if is_end_of_task(error):
                raise
            body = pickle.dumps((None, portable(error)))
        self._frames.send(number, body)

    async def _call(self, verb: str, episode: int, *given: Any) -> EnvOpening | EnvReply | tuple[Event, ...] | None:
        if verb == "start":
            name, spent, *given = given  # type: ignore[assignment]
            self._envs[episode] = self._make(name, spent)
        if (env := self._envs.get(episode)) is None:
            assert verb == "close", "start() comes first"
            return None  # it could not be made
        if verb == "close":
            del self._envs[episode]
        work = self._alive(getattr(env, verb)(*given))
        return await calls.call(work, self._seconds, f"{type(env).__name__}.{verb}()")  # type: ignore[no-any-return]

    def _make(self, name: str, spent: float) -> Env:
        try:
            make = self._find(name)
        except UserError as error:  # who asks has found it, so this is no matter of one episode
            raise BackendError(f'env.place = "process": {error}') from error
        return limit_cost(make(), self._max_cost - spent if self._max_cost else 0.0)

    async def _alive(self, work: Awaitable[Any]) -> Any:
        """Tells of life after each call: many that compute for long may follow each other without a pause."""
        try:
            return await work
        finally:
            self._tell_of_life()


def portable(error: BaseException) -> TemperError:
    """The same in words, with the file and line of its author: classes and objects of others may not arrive."""
    return next((kind for kind in MEANT if isinstance(error, kind)), TaskError)(explain_error(error))


def _packed(value: object, verb: str) -> bytes:
    try:
        body = pickle.dumps((value, None))
    except Exception as error:  # objects decide how they are pickled, and raise what they please
        raise TaskError(
            f"what {verb}() returned cannot be sent to another process ({error}). Return plain values, or use "
            f'env.place = "here"'
        ) from error
    if len(body) > MAX_BYTES:
        raise TaskError(f"what {verb}() returned has {len(body):,} bytes; at most {MAX_BYTES:,} are sent")
    return body
