"""A stream of tasks that choosers have a say in.

Owns: the bounded search for a prompt that they want, and what happens when there is none. Refuses: remembering: its
state is that of the stream below it, small enough to be kept for every draw that is not consumed yet, and what draws
came to is in memory.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from temper.errors import UserError
from temper.tasks.choice.chooser import Look
from temper.tasks.choice.memory import ChosenDraw, PromptMemory
from temper.tasks.dataset import Stream
from temper.types import Scalar, Task

MOST_LOOKS = 2_000
"""Prompts that a draw comes upon before it takes one that choosers want less than others. To find that all are out, it
looks at two epochs."""


class ChosenStream:
    """Implements rollout.source.TaskStream. Walks the stream below it and passes over what choosers do not want.

    Where no prompt of a source is wanted, the first that is not out is drawn; where all are out, the draw goes to
    another source; where all sources are, a UserError says so.
    """

    def __init__(self, stream: Stream, memory: PromptMemory) -> None:
        self._stream = stream
        self._memory = memory
        self._empty: set[int] = set()
        """Sources whose prompts are all out."""
        self._empty_at = 0
        """The step after which they were found to be: what is consumed later may change it."""

    def next(self) -> tuple[int, Task]:
        """The number of this draw, from 0, and its task."""
        if self._empty_at != self._memory.step:
            self._empty, self._empty_at = set(), self._memory.step
        if (before := self._memory.recall(self._stream.num_draws)) is not None:
            return self._repeat(before)
        weights = self._memory.weights() or self._stream.weights
        while len(self._empty) < len(weights):
            left = [0.0 if place in self._empty else weight for place, weight in enumerate(weights)]
            chosen = self._stream.pick(left)
            if (index := self._search(chosen)) is not None:
                draw = self._stream.finish_draw()
                self._memory.note(draw, ChosenDraw(chosen, index, self._positions()))
                return draw, self._stream.sources[chosen].task(index)
            self._empty.add(chosen)
        raise UserError(_explain_end(self._memory))

    def state(self) -> dict[str, Scalar | list[Scalar]]:
        return self._stream.state()

    def load_state(self, state: Mapping[str, Scalar | list[Scalar]]) -> None:
        self._stream.load_state(state)
        self._empty = set()

    def _positions(self) -> tuple[int, ...]:
        return tuple(cast(list[int], self._stream.state()["positions"]))

    def _repeat(self, before: ChosenDraw) -> tuple[int, Task]:
        """The draw as it was before a resume: what is known now would choose another prompt, and lose this one."""
        draw = self._stream.finish_draw()
        self._stream.load_state({**self._stream.state(), "positions": [*before.positions]})
        return draw, self._stream.sources[before.source].task(before.index)

    def _search(self, chosen: int) -> int | None:
        """Index of the source's next task that is wanted, or else of the first that is not out. None: all are out."""
        memory, second = self._memory, None
        for number in range(self._stream.reach(chosen)):
            task = self._stream.take(chosen)
            memory.num_looks += 1
            if task.id not in memory.out:
                if memory.wants(self._look(task, number)):
                    return self._stream.index
                second = self._stream.index if second is None else second
            memory.num_skips += 1
            if second is not None and number >= MOST_LOOKS:
                break
        memory.num_skips -= second is not None
        return second

    def _look(self, task: Task, number: int) -> Look:
        stream, history = self._stream, self._memory.histories.get(task.id)
        return Look(seed=stream.seed, draw=stream.num_draws, number=number, history=history)


def _explain_end(memory: PromptMemory) -> str:
    rates = [one.rate for one in memory.histories if one.task_id in memory.out and one.rate is not None]
    names = sorted({name for found in memory.out.values() for name in found})
    return (
        f"no prompt is left to draw after step {memory.step}: data.choose ({', '.join(names)}) has put out all "
        f"{len(rates)}, whose running pass rates are {min(rates):.2f} to {max(rates):.2f}, "
        f"{sum(rates) / len(rates):.2f} in the mean. Add harder prompts, raise its threshold, or let the stage end "
        f"there with steps = {memory.step}; then go on with --resume"
    )
