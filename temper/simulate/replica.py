"""One sampler's GPU: sequences that draw together, each a token per decode step.

Owns: who runs and who waits, how many steps are done by now, the seconds in which it computed. Looked at only when
something starts, ends or changes: between two such instants every step takes as long as the one before, so a thousand
tokens cost as much as one. Refuses: requests and futures (sampler.py), and lengths.
"""

from __future__ import annotations

import asyncio
import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from numpy.typing import NDArray

from temper.simulate.speeds import Speeds

NEARLY = 1e-6
"""Of a step: what rounding may leave to be done of the last one."""


@dataclass(slots=True, eq=False)
class DrawnRow:
    """One sequence."""

    prompt: object
    """Equal prompts are computed once, until the weights change."""
    prompt_tokens: int
    tokens: int
    """How many it will draw."""
    finished: Callable[[DrawnRow], None]
    first_step: float = -1.0
    """How many steps were done when it was admitted; -1: it waits."""
    versions: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """Of the weights that drew each token, once it has left."""


class Replica:
    """Sequences of one GPU. Uses the clock of the running event loop."""

    def __init__(self, speeds: Speeds, *, max_running: int, kv_tokens: int) -> None:
        self._speeds, self._max_running, self._kv_tokens = speeds, max_running, kv_tokens
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[DrawnRow] = deque()
        self._heap: list[tuple[float, int, DrawnRow]] = []
        """Rows by the step after which they end. Those that were removed are skipped."""
        self._running: set[DrawnRow] = set()
        self._numbers = count()
        self._reserved = 0
        """Tokens of the cache that running rows will need at their ends."""
        self._held = 0.0
        """Tokens that are in the cache."""
        self._steps = 0.0
        self._prefill_seconds = 0.0
        """Of prompts that are yet to be computed and requests yet to be begun, before the next decode step."""
        self._computed: set[object] = set()
        """Prompts whose keys and values are there, by the weights of now."""
        self._step_seconds = 1.0
        """Of each decode step since the last look."""
        self._seen = self._loop.time()
        self._holds = 0
        self._timer: asyncio.TimerHandle | None = None
        self._beginning: asyncio.Handle | None = None
        self._weights: list[tuple[float, int]] = [(-1.0, 0)]
        """(steps done when they came, version) of all weights that running rows may have drawn with."""
        self.busy_seconds = 0.0
        self.decoded = self.row_seconds = 0.0

    @property
    def load(self) -> int:
        return len(self._running) + len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def kv_use(self) -> float:
        return self._held / self._kv_tokens if self._kv_tokens else 0.0

    def add(self, row: DrawnRow) -> None:
        self._waiting.append(row)
        if self._beginning is None:  # many come at one instant: looked at once
            self._beginning = self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._beginning = None
        self._ring()

    def remove(self, row: DrawnRow) -> int:
        """Ends a row before its time; returns how many tokens it has drawn."""
        self._look()
        if row in self._running:
            drawn = min(row.tokens, int(self._steps - row.first_step + NEARLY))
            self._leave(row, drawn)
        else:
            drawn = 0
            self._waiting.remove(row)
        self._go_on()
        return drawn

    def change_weights(self, version: int) -> None:
        self._look()
        oldest = min((row.first_step for row in self._running), default=self._steps)
        keep = max(0, bisect_right(self._weights, oldest, key=lambda entry: entry[0]) - 1)
        self._weights = [*self._weights[keep:], (self._steps, version)]
        self._computed.clear()

    def hold(self) -> None:
        """Nothing is computed until go_on() is called as often."""
        self._look()
        self._holds += 1
        self._go_on()

    def go_on(self) -> None:
        self._look()
        self._holds -= 1
        self._go_on()

    def _look(self) -> None:
        """Brings the steps that are done up to now."""
        now = self._loop.time()
        elapsed, self._seen = now - self._seen, now
        if self._holds or not self._running or elapsed <= 0:
            return
        self.busy_seconds += elapsed
        self.row_seconds += elapsed * len(self._running)
        prefilled = min(elapsed, self._prefill_seconds)
        self._prefill_seconds -= prefilled
        steps = (elapsed - prefilled) / self._step_seconds
        self._steps += steps
        self._held += steps * len(self._running)
        self.decoded += steps * len(self._running)

    def _go_on(self) -> None:
        """Ends, admits, and sets the timer of the next end."""
        while self._heap and (self._heap[0][2] not in self._running or self._heap[0][0] <= self._steps + NEARLY):
            row = heapq.heappop(self._heap)[2]
            if row in self._running:
                self._leave(row, row.tokens)
                row.finished(row)
        if not self._holds:
            self._admit()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._heap and not self._holds:
            steps, rows = self._heap[0][0] - self._steps, len(self._running)
            # The cache grows by a token of each row and step: its mean until the next end stands for all of them.
            self._step_seconds = self._speeds.decode_seconds(rows, self._held + rows * steps / 2)
            self._timer = self._loop.call_later(self._prefill_seconds + steps * self._step_seconds, self._ring)

    def _ring(self) -> None:
        self._look()
        self._go_on()

    def _admit(self) -> None:
        """In order of arrival. Room in the cache is kept for all that a row will draw: nobody is preempted."""
        while self._waiting and len(self._running) < self._max_running:
            row = self._waiting[0]
            needed = row.prompt_tokens + row.tokens
            if self._running and self._kv_tokens and self._reserved + needed > self._kv_tokens:
                break
            self._waiting.popleft()
            self._prefill_seconds += self._speeds.request
            if row.prompt not in self._computed:
                self._computed.add(row.prompt)
                self._prefill_seconds += row.prompt_tokens * self._speeds.prefill_token
            row.first_step = self._steps
            self._running.add(row)
            self._reserved += needed
            self._held += row.prompt_tokens
            heapq.heappush(self._heap, (self._steps + row.tokens, next(self._numbers), row))

    def _leave(self, row: DrawnRow, drawn: int) -> None:
        self._running.discard(row)
        self._reserved -= row.prompt_tokens + row.tokens
        self._held = max(0.0, self._held - row.prompt_tokens - drawn) if self._running else 0.0
        row.versions = self._versions(row.first_step, drawn)

    def _versions(self, first_step: float, drawn: int) -> NDArray[np.int32]:
        """Of each token: the token of a step is drawn by the weights that were there when the step began."""
        if len(self._weights) == 1 or self._weights[-1][0] <= first_step + NEARLY:
            return np.full(drawn, self._weights[-1][1], np.int32)
        versions = np.empty(drawn, np.int32)
        for since, version in self._weights:
            versions[max(0, int(np.ceil(since - first_step - NEARLY))) :] = version
        return versions
