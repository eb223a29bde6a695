"""A crowd of episodes goes on a few at a time: in between the event loop sees to everything else.

Owns: how many go on in one turn of the loop. Refuses: choosing by the clock; what is drawn next must not depend on it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from weakref import WeakKeyDictionary

PER_TURN = 16
"""Episodes that begin, open, take up an answer or are scored in one turn: 5 to 10 ms of computing. Of 512 at once the
answers were 100 in two turns, and the starts of their threads 500 in one."""


class Turnstile:
    """Lets `per_turn` coroutines pass in one turn of the event loop; the others follow in order, turn by turn."""

    def __init__(self, per_turn: int = PER_TURN) -> None:
        self._per_turn = self._free = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        loop = asyncio.get_running_loop()
        if self._free == self._per_turn:  # the first of this turn
            loop.call_soon(self._begin_turn)
        if self._free:
            self._free -= 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        await place

    def _begin_turn(self) -> None:
        self._free = self._per_turn
        while self._free and self._waiting:
            place = self._waiting.popleft()
            if not place.done():  # else whoever waited was cancelled
                place.set_result(None)
                self._free -= 1
        if self._free < self._per_turn:
            asyncio.get_running_loop().call_soon(self._begin_turn)


_TURNSTILES: WeakKeyDictionary[asyncio.AbstractEventLoop, Turnstile] = WeakKeyDictionary()


async def take_turn() -> None:
    """Through the turnstile of this event loop."""
    await _TURNSTILES.setdefault(asyncio.get_running_loop(), Turnstile()).enter()
