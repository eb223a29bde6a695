"""The penalty for saying the same thing again and again.

Owns: kind "repetition". Refuses: tokens; it counts words, so that every tokenizer is judged alike.
"""

from __future__ import annotations

import unicodedata
from itertools import pairwise

from temper.errors import UserError
from temper.protocols import Reward
from temper.rewards.form.visible import num_visible
from temper.types import Score, Task, Trajectory


def repeated_share(text: str, n: int) -> float:
    """1 - distinct / all n-grams of words, or of characters for scripts without spaces; 0 for shorter texts."""
    words = split_words(text)
    grams = [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def split_words(text: str) -> list[str]:
    """Words in lower case. Letters of scripts without spaces, and marks, stand alone: spaces must not hide a loop."""
    text = text.casefold()
    cuts = [0, *(place for place, (a, b) in enumerate(pairwise(text), 1) if _kind(a) != _kind(b) or not _kind(a))]
    pieces = (text[start:end].strip() for start, end in pairwise([*cuts, len(text)]))
    return [piece for piece in pieces if piece]


def _kind(character: str) -> str:
    """What runs together: letters of spaced scripts and digits. '' stands alone."""
    if character.isdigit():
        return "digit"
    if character.isspace():
        return "space"
    category = unicodedata.category(character)
    return "letter" if category[0] in "LM" and category != "Lo" else ""


class RepetitionReward(Reward):
    """-share of repeated n-grams (0: nothing repeated); with is_positive 1 - share. A response that shows nothing has
    the worst score: leaving a penalty by saying nothing must not pay."""

    name = "repetition"

    def __init__(self, *, n: int = 4, is_positive: bool = False) -> None:
        if n < 1:
            raise UserError(f'reward "repetition": n={n} must be at least 1, e.g. n = 4.')
        self._n = n
        self._offset = 1.0 if is_positive else 0.0

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        text = "\n".join(turn.message.content for turn in trajectory.turns)
        if not num_visible(text):
            return Score.of(self._offset - 1.0, "the response is empty")
        return Score.of(self._offset - repeated_share(text, self._n))
