"""Rewards on the text itself: equality, containment, overlap of words, edit distance, rearrangement.

Owns: kinds "exact", "contains", "f1", "edit", "rearranged". Refuses: form (format.py) and meaning.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Callable

from temper.protocols import Reward
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


def token_f1(text: str, answer: str) -> float:
    """Harmonic mean of precision and recall over words, as in SQuAD: case, punctuation and articles do not count.

    A response that lists every word pays with its precision.
    """
    words, wanted = Counter(_bare_words(text)), Counter(_bare_words(answer))
    if not words or not wanted:
        return float(words == wanted)
    return 2 * (words & wanted).total() / (words.total() + wanted.total())


_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def _bare_words(text: str) -> list[str]:
    words = text.lower().translate(_NO_PUNCTUATION).split()
    return [word for word in words if word not in ("a", "an", "the")]


def same_letters(text: str, answer: str) -> float:
    """1 when the response has exactly the letters of the answer, in any order."""
    return float(sorted(text) == sorted(answer))


COMPARISONS: dict[str, Callable[[str, str], float]] = {
    "contains": contains,
    "edit": edit_similarity,
    "exact": equal,
    "f1": token_f1,
    "rearranged": same_letters,
}

WHOLE = ("contains", "exact")
"""Comparisons that pay nothing unless the whole answer is there."""


class TextReward(Reward):
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
        if not task.answer or not task.answer.strip():  # an empty answer is contained in every response
            return "it has no gold answer"
        worked, mark, result = task.answer.rpartition("####")
        if mark and worked.strip() and self.name in WHOLE:
            return (
                f'its answer is a worked solution with "####" before the result, and a response would have to repeat '
                f'all of it. To ask for {result.strip()!r} alone, set answer_pattern = "#### (.+)"'
            )
        return None


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
