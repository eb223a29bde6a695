"""Rewards on the text itself: equality, containment, edit distance, rearrangement, format.

Owns: kinds "exact", "contains", "edit", "rearranged", "format".
Refuses: regular expressions in this process; one can take for ever.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from temper.errors import UserError
from temper.rewards.workers import WorkerFailed, WorkerPool
from temper.types import Score, Task, Trajectory


def equal(text: str, answer: str) -> float:
    """1 when the response is the answer."""
    return float(text == answer)


def contains(text: str, answer: str) -> float:
    """1 when the answer stands somewhere in the response. Weak: a response that lists every answer scores."""
    return float(answer in text)


def edit_similarity(text: str, answer: str) -> float:
    """1 - Levenshtein distance / the longer length: 1 when equal, 0 when nothing agrees."""
    return 1.0 - edit_distance(text, answer) / max(len(text), len(answer), 1)


def same_letters(text: str, answer: str) -> float:
    """1 when the response has exactly the letters of the answer, in any order."""
    return float(sorted(text) == sorted(answer))


COMPARISONS: dict[str, Callable[[str, str], float]] = {
    "contains": contains,
    "edit": edit_similarity,
    "exact": equal,
    "rearranged": same_letters,
}


class TextReward:
    """Compares the response with the gold answer; space around either does not count."""

    def __init__(self, name: str, *, ignore_case: bool = False) -> None:
        self.name = name
        self._compare = COMPARISONS[name]
        self._ignore_case = ignore_case

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        if task.answer is None:
            return Score.error("the task has no gold answer")
        text, answer = trajectory.text.strip(), task.answer.strip()
        if self._ignore_case:
            text, answer = text.casefold(), answer.casefold()
        return Score.of(self._compare(text, answer))

    def check(self, task: Task) -> str | None:
        # An empty answer is contained in every response.
        return None if task.answer and task.answer.strip() else "it has no gold answer"

    async def close(self) -> None:
        pass


def edit_distance(left: str, right: str) -> int:
    """Levenshtein distance, bit-parallel (Myers 1999, Hyyrö 2001): one column of the table is one big integer.

    A response of thousands of characters costs milliseconds; the textbook table would stall every other episode.
    """
    if not left:
        return len(right)
    masks: dict[str, int] = {}
    for place, character in enumerate(left):
        masks[character] = masks.get(character, 0) | (1 << place)
    full, last = (1 << len(left)) - 1, 1 << (len(left) - 1)
    up, down, distance = full, 0, len(left)  # bits where the column rises and falls by 1 from row to row
    for character in right:
        match = masks.get(character, 0)
        diagonal = ((((match & up) + up) ^ up) | match | down) & full
        rise, fall = down | (full & ~(diagonal | up)), up & diagonal
        distance += bool(rise & last) - bool(fall & last)
        rise = ((rise << 1) | 1) & full
        fall = (fall << 1) & full
        up, down = fall | (full & ~(diagonal | rise)), rise & diagonal
    return distance


class FormatReward:
    """1 when the whole response matches the regular expression ("." also matches line ends), else 0."""

    name = "format"

    def __init__(self, *, pattern: str, workers: int = 1, deadline_seconds: float = 2.0) -> None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(f'reward "format": pattern {pattern!r} is not a regular expression: {error}') from error
        self._pattern = pattern
        self._pool = WorkerPool("temper.rewards.patterns:matches", size=workers, deadline_seconds=deadline_seconds)

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        try:
            return Score.of(float(await self._pool.call(self._pattern, trajectory.text)))
        except WorkerFailed as error:
            return Score.error(str(error))

    def check(self, task: Task) -> str | None:
        return None

    async def close(self) -> None:
        self._pool.close()
