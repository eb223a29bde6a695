"""What happens in a run while somebody looks, as server-sent events.

Owns: one look a second at each watched run, shared by all who listen; clients that leave or stop reading.
Refuses: lasting tasks and connections; when nobody listens, nothing is left.
"""

from __future__ import annotations

import asyncio
import math
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from temper.dashboard import queries
from temper.dashboard.answers import Receive, Scope, Send, refuse, to_json
from temper.dashboard.database import OutOfTime, reading, signature
from temper.dashboard.registry import KnownRun, Registry
from temper.errors import UserError
from temper.runs.state import DEAD_AFTER_SECONDS, RunState

LOOK_EVERY_SECONDS = 1.0
TICK_SECONDS = 0.25
ALIVE_EVERY_SECONDS = 15.0
SEND_SECONDS = 20.0
"""Time for a client to take what it is sent; then it is given up."""
MOST_WAITING = 200
"""Events that wait for one client; the oldest give way, since each only says "look again"."""

Event = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """As much of a run as a client is told about."""

    stage: int | None
    step: int | None
    run: RunState
    evaluations: frozenset[tuple[int, int, str, float | None]]
    alarms: frozenset[tuple[int, int, str, str]]


def read_state(folder: Path) -> State:
    with reading(folder) as database:
        stage, step = queries.last_step(database)
        return State(
            stage=stage,
            step=step,
            run=queries.run_state(database),
            evaluations=frozenset(queries.known_evaluations(database)),
            alarms=frozenset(queries.known_alarms(database)),
        )


def news(before: State | None, now: State) -> list[Event]:
    """What a client that knew `before` should hear. One that knew nothing hears where the run is, not its history."""
    found: list[Event] = []
    if now.step is not None and (before is None or (before.stage, before.step) != (now.stage, now.step)):
        found.append(("step", {"stage": now.stage, "step": now.step}))
    if before is not None:
        for stage, step, name, score in sorted(now.evaluations - before.evaluations, key=lambda found: found[:3]):
            found.append(("evaluation", {"stage": stage, "step": step, "name": name, "score": score}))
        for stage, step, rule, level in sorted(now.alarms - before.alarms):
            found.append(("alarm", {"stage": stage, "step": step, "rule": rule, "level": level}))
    if before is None or (before.run.name, before.run.text) != (now.run.name, now.run.text):
        found.append(("state", {"state": now.run.name, "text": now.run.text}))
    return found


class Feed:
    """One run, looked at on behalf of all who listen to it."""

    def __init__(self, run: KnownRun) -> None:
        self.run = run
        self.listeners: list[deque[Event]] = []
        self._state: State | None = None
        self._signature: tuple[Any, ...] = ()
        self._looked = -math.inf

    def listener(self) -> deque[Event]:
        heard: deque[Event] = deque(maxlen=MOST_WAITING)
        if self._state is not None:
            heard.extend(news(None, self._state))
        self.listeners.append(heard)
        return heard

    async def look(self) -> None:
        """Reads the run when its last look is a second old and its files have changed since."""
        if time.monotonic() - self._looked < LOOK_EVERY_SECONDS:
            return
        self._looked = time.monotonic()  # before the look: whoever comes meanwhile need not look, too
        found = await asyncio.to_thread(self._read_if_changed)
        if found is None:
            return
        for heard in self.listeners:
            heard.extend(news(self._state, found))
        self._state = found

    def _read_if_changed(self) -> State | None:
        """None: nothing new, or the run is not there, or not yet."""
        try:
            found = signature(self.run.folder)
            if found == self._signature and not self._is_silent():
                return None
            state = read_state(self.run.folder)
        except (OSError, UserError, sqlite3.Error, OutOfTime):
            return None  # tried again in a second; a run that comes back is then told of
        self._signature = found
        return state

    def _is_silent(self) -> bool:
        """Whether a run that was alive should have shown it by now: a dead one changes no file."""
        run = None if self._state is None else self._state.run
        return run is not None and run.name == "running" and time.time() - (run.heartbeat or 0) > DEAD_AFTER_SECONDS


class Streams:
    """Implements the ASGI interface for /api/stream?run=ID."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.feeds: dict[str, Feed] = {}
        """Feeds of the runs that somebody listens to."""
        self.is_closing: Callable[[], bool] = lambda: False
        """Streams end by themselves when the server should, which otherwise waits for them."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = parse_qs(scope["query_string"].decode("latin-1")).get("run", [""])[0]
        run = next((run for run in await asyncio.to_thread(self._registry.runs) if run.id == asked), None)
        if run is None:
            await refuse(send, 404, f"there is no run {asked[:40]!r} here")
            return
        leaving = asyncio.create_task(_until_gone(receive))
        try:
            with self._listening(run) as (feed, heard):
                await self._tell(feed, heard, send, leaving)
        except (TimeoutError, OSError):
            return  # the client is gone, or has stopped reading
        finally:
            leaving.cancel()

    @contextmanager
    def _listening(self, run: KnownRun) -> Iterator[tuple[Feed, deque[Event]]]:
        feed = self.feeds.setdefault(run.id, Feed(run))
        heard = feed.listener()
        try:
            yield feed, heard
        finally:
            feed.listeners = [other for other in feed.listeners if other is not heard]
            if not feed.listeners:
                self.feeds.pop(run.id, None)

    async def _tell(self, feed: Feed, heard: deque[Event], send: Send, leaving: asyncio.Task[None]) -> None:
        """Until the client leaves, stops reading, or the server closes."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        async with asyncio.timeout(SEND_SECONDS):
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"retry: 2000\n\n", "more_body": True})
        sent = time.monotonic()
        while not leaving.done() and not self.is_closing():
            await feed.look()
            text = "".join(_written(*heard.popleft()) for _ in range(len(heard)))
            if not text and time.monotonic() - sent >= ALIVE_EVERY_SECONDS:
                text = ": still here\n\n"
            if text:
                async with asyncio.timeout(SEND_SECONDS):
                    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
                sent = time.monotonic()
            await asyncio.wait({leaving}, timeout=TICK_SECONDS)
        if not leaving.done():
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _written(kind: str, content: dict[str, Any]) -> str:
    # JSON has no line breaks outside of strings and escapes those inside, so an event is always one line of data.
    return f"event: {kind}\ndata: {to_json(content).decode()}\n\n"


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
