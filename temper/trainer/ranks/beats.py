"""Signs of life of trainer ranks: which of them is silent, and that none waits for a rank 0 that it cannot hear.

A rank that is stopped or cut off says nothing, and neither do those who wait for it in a collective: only threads that
beat on their own tell the two apart. Owns: those threads, and how a rank ends whose rank 0 is gone. Refuses: what is
done about a silent rank (channel.py).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from temper.terminal import SafeConsole

EVERY_SECONDS = 0.5
LOOK_SECONDS = 3.0
"""Between two looks at beats that are compared: several of them, also on crowded cores."""
GRACE_SECONDS = 5.0
"""For a rank that was told to end to have ended by itself, when the store of rank 0 goes."""
OVER = "over"
HEARD_SECONDS = 3.0
"""For the others to see that rank 0 has left the run, before the store goes with it."""
GONE_CODE = 3
"""As of a run that broke."""


class Beats:
    """Of one rank: it beats until it is closed."""

    def __init__(self, store: Store, rank: int) -> None:
        """The store is asked by the thread alone: one that is shared would be held by whoever waits for a word."""
        self._store, self._rank = store, rank
        self._closed = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._beat, name="beats of a trainer rank", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _beat(self) -> None:
        store, number = _own(self._store), 0
        while not self._closed.is_set():
            number += 1
            try:
                store.set(_key(self._rank), str(number))
            except DistError:
                return  # rank 0 is gone, and with it whoever would look
            self._closed.wait(EVERY_SECONDS)


def find_silent(store: Store, ranks: Sequence[int]) -> list[int]:
    """Those of them that do not beat any more, or never did."""

    def look() -> list[bytes]:
        return [store.get(_key(rank)) if store.check([_key(rank)]) else b"" for rank in ranks]

    before = look()
    time.sleep(LOOK_SECONDS)
    after = look()
    return [rank for rank, *beats in zip(ranks, before, after, strict=True) if beats[0] == beats[1]]


def end_others(store: Store, ranks: Sequence[int]) -> None:
    """Rank 0 leaves the run. Waits for: every living rank to have seen it, for HEARD_SECONDS; one that sees no more
    than that the store is gone takes that for a failure."""
    store.set(OVER, "")
    heard, end = [_heard(rank) for rank in ranks], time.monotonic() + HEARD_SECONDS
    while not store.check(heard) and time.monotonic() < end:
        time.sleep(EVERY_SECONDS / 10)


class Watchdog:
    """On a rank that rank 0 did not start as its child: ends this process when rank 0 has left the run, or cannot be
    heard for so long. Whatever the main thread waits for then, a word or a collective, would never come."""

    def __init__(self, store: Store, rank: int, seconds: float, leave: Callable[[int], None] = os._exit) -> None:
        """rank: of this process."""
        self._store, self._rank, self._seconds, self._leave = store, rank, seconds, leave
        self._closed, self._heard = threading.Event(), time.monotonic()
        self.is_over = False
        """Whether rank 0 has said that it leaves the run."""

    def start(self) -> None:
        # Two threads: one that asks a store behind a cut cable gets no answer, and no error either.
        for work in (self._listen, self._wait):
            threading.Thread(target=work, name="watchdog of a trainer rank", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _listen(self) -> None:
        store, last = _own(self._store), b""
        while not self._closed.wait(EVERY_SECONDS):
            try:
                if store.check([OVER]):
                    self.is_over = True
                    store.set(_heard(self._rank), "")
                    return self._end("rank 0 has left the run", 0)
                beat = store.get(_key(0)) if store.check([_key(0)]) else b""
            except DistError as error:
                return self._end(f"rank 0 is gone: {error}", GONE_CODE)
            if beat != last:
                last, self._heard = beat, time.monotonic()

    def _wait(self) -> None:
        while not self._closed.wait(EVERY_SECONDS):
            if time.monotonic() - self._heard > self._seconds:
                return self._end(f"nothing was heard of rank 0 for {self._seconds:g} s", GONE_CODE)

    def _end(self, why: str, code: int) -> None:
        if not self._closed.wait(GRACE_SECONDS):
            SafeConsole(stderr=True, soft_wrap=True).print(f"temper: this trainer rank ends: {why}", highlight=False)
            self._leave(code)


def _own(store: Store) -> Store:
    """A connection of one thread alone."""
    own: Store = store.clone()  # type: ignore[attr-defined]
    return own


def _heard(rank: int) -> str:
    return f"heard/{rank}"


def _key(rank: int) -> str:
    return f"beat/{rank}"
