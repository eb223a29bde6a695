"""What a sampler process was asked and has not answered yet.

Owns: which answer belongs to which question, and what is told before it. Refuses: the connection (client.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from temper.engine.process.saving import VERB as SO_FAR
from temper.engine.process.wire import Frame, completion_of, error_of
from temper.types import Completion

ORDER = 0
"""Number of the first question."""

Tell = Callable[[int, int], None]
"""Hears how much is done, and of how much."""


class Questions:
    """By number. One event loop asks."""

    def __init__(self) -> None:
        self._asked: dict[int, asyncio.Future[Frame]] = {}
        self._progress: dict[int, Tell] = {}
        self._saved: dict[int, Frame] = {}
        self._last = ORDER - 1

    def __contains__(self, call: int) -> bool:
        return call in self._asked

    def ask(self, tell: Tell | None = None) -> tuple[int, asyncio.Future[Frame]]:
        """A number, and where its answer will be. tell: told on the way how far it is."""
        self._last += 1
        answer = self._asked[self._last] = asyncio.get_running_loop().create_future()
        if tell is not None:
            self._progress[self._last] = tell
        return self._last, answer

    def drop(self, call: int) -> bool:
        """Whether it still waited. Its answer counts for nothing any more."""
        self._saved.pop(call, None)
        return self._asked.pop(call, None) is not None

    def take(self, frame: Frame) -> None:
        if frame.verb == "progress":
            self._progress[frame.call](frame.fields["done"], frame.fields["total"])
            return
        if frame.verb == SO_FAR:
            if frame.call in self._asked:
                self._saved[frame.call] = frame
            return
        self._progress.pop(frame.call, None)
        answer = self._asked.pop(frame.call, None)
        if answer is None or answer.done():
            return  # its caller was cancelled
        if frame.verb == "error":
            answer.set_exception(error_of(frame))
        else:
            answer.set_result(frame)

    def fail(self, failure: Callable[[Completion | None], Exception]) -> None:
        """failure: told what was told of an answer."""
        for call, answer in self._asked.items():
            if not answer.done():
                answer.set_exception(failure(self._so_far(call)))
        self._asked.clear()

    def _so_far(self, call: int) -> Completion | None:
        """What was told of its answer before that came."""
        frame = self._saved.get(call)
        return None if frame is None else completion_of(frame)
