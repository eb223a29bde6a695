"""How long a sampler had something to draw.

Owns: the clock over requests in flight, for every kind of engine. Refuses: what the figure means (runs/time_split.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class InFlight:
    """Runs while there is a request and nobody holds the sampler."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._num_requests = self._num_holders = 0
        self._since = 0.0
        """When it began to run; only while it runs."""
        self._seconds = 0.0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Around a request that is drawn."""
        self._turn(requests=1)
        try:
            yield
        finally:
            self._turn(requests=-1)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Around what keeps the sampler from drawing: requests wait."""
        self._turn(holders=1)
        try:
            yield
        finally:
            self._turn(holders=-1)

    def seconds(self) -> float:
        """Since the last call."""
        self._turn()
        found, self._seconds = self._seconds, 0.0
        return found

    def _turn(self, *, requests: int = 0, holders: int = 0) -> None:
        now = self._now()
        if self._num_requests and not self._num_holders:
            self._seconds += now - self._since
        self._num_requests += requests
        self._num_holders += holders
        self._since = now
