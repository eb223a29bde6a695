"""An event loop whose time jumps to the next timer: hours of waiting take no time at all.

Owns: virtual time, and that work in threads takes as much of it as that work says. Refuses: sockets and real threads.
Every deadline of asyncio (timeout, wait, sleep) is measured by the loop's own time and needs no change.
"""

from __future__ import annotations

import asyncio
import contextvars
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

RESOLUTION_SECONDS = 1e-6
"""Timers closer than this ring together. Above the rounding of a clock that shows years."""


class Deadlock(RuntimeError):
    """Everything waits, and no timer is set that would end it."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs what is ready; when nothing is, time is that of the next timer. Begins at 0."""

    def __init__(self) -> None:
        self._now = 0.0
        self._spent = 0.0
        super().__init__(_Jumps(self))
        self._clock_resolution = RESOLUTION_SECONDS

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        self._now += seconds

    def spend(self, seconds: float) -> None:
        """Called inside work that asyncio.to_thread runs: it took this long."""
        self._spent += seconds

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Computes at once; the result is there after the seconds that the work has spent."""
        self._spent, done = 0.0, self.create_future()
        try:
            value = func(*args)
        except Exception as error:
            self.call_later(self._spent, _fail, done, error)
        else:
            self.call_later(self._spent, _deliver, done, value)
        return done


class _Jumps(selectors.BaseSelector):
    """Where the loop would sleep until a file or a timer is ready. There are no files here, so time is moved on."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._real = selectors.DefaultSelector()  # holds what asyncio registers for itself

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock(
                f"at {self._loop.time():g} s of virtual time everything waits, and no deadline would end it. A wait "
                "without a deadline is a mistake in the program"
            )
        if timeout > 0:
            self._loop.jump(timeout)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def get_map(self) -> Any:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


def _deliver(done: asyncio.Future[Any], value: Any) -> None:
    if not done.done():
        done.set_result(value)


def _fail(done: asyncio.Future[Any], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)


def spend(seconds: float) -> None:
    """The work of now, in a simulated thread, takes this long."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop), "time is spent on a virtual clock only"
    loop.spend(seconds)


def run_virtual(main: Coroutine[Any, Any, Result]) -> Result:
    """asyncio.run on a virtual clock of its own."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main, context=contextvars.copy_context())
