"""What all plays of one episode share: its time, and how often they may be lost with the process of its environment.

Owns: the clock, which stands still while nobody is let draw; what is told of lost plays, and which of them the episode
may have caused. Refuses: playing (episode.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from temper.errors import EnvironmentLost
from temper.protocols import Env, MayBeLost
from temper.types import Event, EventKind, lasting

MOST_SUSPECTED = 3
"""Plays of an episode with a call under way when they were lost: it may be the one that ends its processes. The last of
them has a process of its own, so that no other episode ends it, and it ends no other."""


@dataclass(frozen=True, slots=True)
class LostPlays:
    """Those of one episode so far."""

    events: tuple[Event, ...] = ()
    """One that tells of each, with its cost, and what it did to the world."""
    num_suspected: int = 0

    def ends_with(self, loss: EnvironmentLost) -> bool:
        """Whether this loss is the end of the episode."""
        return self.num_suspected + loss.is_suspect == MOST_SUSPECTED

    def add(self, loss: EnvironmentLost, events: Sequence[Event]) -> LostPlays:
        """events: all of the play."""
        number = 1 + sum(event.kind is EventKind.REPLAYED for event in self.events)
        cost = math.fsum(event.cost for event in events)
        told = Event(kind=EventKind.REPLAYED, name=f"play {number}", detail=str(loss), cost=cost)
        done = lasting(events, f"play {number}, whose process was lost")
        free = (dataclasses.replace(event, cost=0.0) for event in done)  # or it would be counted twice
        return LostPlays((*self.events, told, *free), self.num_suspected + loss.is_suspect)

    def prepare(self, env: Env) -> None:
        """For an environment that plays after them."""
        if self.events and isinstance(env, MayBeLost):
            spent = math.fsum(event.cost for event in self.events)
            env.replay(spent=spent, alone=self.num_suspected == MOST_SUSPECTED - 1)


class TimeLimit:
    """Of one episode. Constructed when it begins."""

    def __init__(self, seconds: float) -> None:
        self._ends_at = asyncio.get_running_loop().time() + seconds
        self._timeout: asyncio.Timeout | None = None
        self._num_holders = 0
        self._held_since = 0.0

    @asynccontextmanager
    async def bounds(self) -> AsyncIterator[None]:
        """Around a play: TimeoutError when the time is over."""
        token = _OF_THIS_EPISODE.set(self)
        try:
            async with asyncio.timeout_at(self._ends_at) as self._timeout:
                yield
        finally:
            self._timeout = None  # it has ended, and cannot be moved by what is still being drawn
            _OF_THIS_EPISODE.reset(token)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Around a wait that is not the episode's. It may draw several answers at once."""
        if self._num_holders == 0:
            self._held_since = asyncio.get_running_loop().time()
            self._end_at(None)
        self._num_holders += 1
        try:
            yield
        finally:
            self._num_holders -= 1
            if self._num_holders == 0:
                self._ends_at += asyncio.get_running_loop().time() - self._held_since
                self._end_at(self._ends_at)

    def _end_at(self, when: float | None) -> None:
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(when)


_OF_THIS_EPISODE: ContextVar[TimeLimit | None] = ContextVar("time_limit", default=None)


@contextmanager
def standing_still() -> Iterator[None]:
    """The time of the episode in which this is called; anywhere else it changes nothing."""
    limit = _OF_THIS_EPISODE.get(None)
    if limit is None:
        yield
        return
    with limit.held():
        yield
