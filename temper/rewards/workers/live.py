"""Functions that were handed over in Python, called in threads of this process.

Owns: deadlines for them, and what their exceptions become. Refuses: killing them; a thread cannot be killed, so a
function that hangs is left behind and its score is an error. Named in a recipe, the same function runs in a process
that can be killed (pool.py).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Protocol

from temper.calls import explain_error
from temper.rewards.workers.pool import WorkerFailed

MAX_HANGING = 16
"""Calls left behind and still running, above which nothing more is started."""


class Calls(Protocol):
    """Where a function runs."""

    async def call(self, *arguments: Any, **named: Any) -> Any:
        """What it returns. Raises WorkerFailed with the reason otherwise."""
        ...

    def close(self) -> None: ...


class LiveCalls:
    """Calls one function, each time in a daemon thread of its own."""

    def __init__(self, function: Callable[..., Any], *, deadline_seconds: float) -> None:
        self._function = function
        self._deadline_seconds = deadline_seconds
        self._hanging: list[threading.Thread] = []

    async def call(self, *arguments: Any, **named: Any) -> Any:
        self._hanging = [thread for thread in self._hanging if thread.is_alive()]
        if len(self._hanging) >= MAX_HANGING:
            raise WorkerFailed(f"{MAX_HANGING} calls hang; nothing more is started")
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Any] = loop.create_future()

        def settle(value: Any, error: BaseException | None) -> None:
            if outcome.done():
                return
            if error is None:
                outcome.set_result(value)
            else:
                outcome.set_exception(WorkerFailed(explain_error(error)))

        def run() -> None:
            value, failure = None, None
            try:
                value = self._function(*arguments, **named)
            except BaseException as error:  # sys.exit() in a reward must not end a run
                failure = error
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, value, failure)

        thread = threading.Thread(target=run, name=f"reward {self._function.__name__}", daemon=True)
        thread.start()
        try:
            return await asyncio.wait_for(outcome, self._deadline_seconds)
        except TimeoutError:
            self._hanging.append(thread)
            raise WorkerFailed(f"timeout after {self._deadline_seconds:g} s") from None

    def close(self) -> None:
        """Nothing to end: what still hangs ends with the process."""
