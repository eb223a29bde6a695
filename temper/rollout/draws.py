"""Draws of the task stream: which is next, which are under way, which are consumed.

Owns: that every draw is consumed once, over any number of resumes. Groups may be trained out of draw order, so what was
consumed is a prefix of the draws and some after it: a checkpoint holds the stream as it was before the first draw that
is not consumed, and the numbers of those after it that are. Refuses: rolling (source.py), the stream itself (tasks/).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from temper.types import Scalar, Task

CONSUMED = "consumed draws"
"""Name under which draws are kept that were consumed before an earlier one, beside the state of the task stream."""

State = Mapping[str, Scalar | list[Scalar]]


class TaskStream(Protocol):
    """A resumable order of tasks; tasks/dataset.py implements it."""

    def next(self) -> tuple[int, Task]: ...
    def state(self) -> dict[str, Scalar | list[Scalar]]: ...
    def load_state(self, state: State) -> None: ...


class TaskDraws:
    def __init__(self, stream: TaskStream) -> None:
        self._stream = stream
        self._states_before: dict[int, dict[str, Scalar | list[Scalar]]] = {}
        """State of the task stream before each draw that is under way."""
        self._returned: dict[int, Task] = {}
        """Draws among them that wait to be started: they were given back, or may not start yet."""
        self._consumed: set[int] = set()
        """Draws after the first that is not consumed."""
        self._num_drawn = 0
        """One more than the newest draw; 0 before the first of this process."""
        self._lock = threading.Lock()
        """A checkpoint asks for the state from a thread of its own, and no draw may be lost between two lines."""

    def next(self, may_start: Callable[[int], bool] = lambda draw: True) -> tuple[int, Task]:
        """The number of the next draw that is not consumed and may start, and its task. Those that were given back go
        before new ones."""
        with self._lock:
            for draw in sorted(self._returned):
                if may_start(draw):
                    return draw, self._returned.pop(draw)
            while True:
                before = self._stream.state()
                draw, task = self._stream.next()
                self._num_drawn = draw + 1
                if draw in self._consumed:
                    continue
                self._states_before[draw] = before
                if may_start(draw):
                    return draw, task
                self._returned[draw] = task

    def give_back(self, draw: int, task: Task) -> None:
        """It was started and will be started again."""
        with self._lock:
            self._returned[draw] = task

    def consume(self, draws: Iterable[int]) -> None:
        """These were trained or dropped."""
        with self._lock:
            for draw in draws:
                del self._states_before[draw]
                self._consumed.add(draw)
            first = min(self._states_before, default=self._num_drawn)
            self._consumed = {draw for draw in self._consumed if draw >= first}

    @property
    def num_overtaken(self) -> int:
        """Draws that are under way, though a later one was consumed."""
        newest = max(self._consumed, default=-1)
        return sum(draw < newest for draw in self._states_before)

    def state(self) -> dict[str, Scalar | list[Scalar]]:
        with self._lock:
            first = min(self._states_before, default=None)
            stream = self._stream.state() if first is None else self._states_before[first]
            return {**stream, CONSUMED: [*sorted(self._consumed)]}

    def load_state(self, state: State) -> None:
        consumed = state.get(CONSUMED, [])  # runs of before have none: they trained in draw order
        self._consumed = {int(draw) for draw in consumed} if isinstance(consumed, list) else set()
        self._stream.load_state({name: value for name, value in state.items() if name != CONSUMED})
