"""Whether a step's answers are as long as those of the steps around it.

Owns: the measure of what it costs to train the quick groups first. Refuses: deciding who is trained (orders.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from temper.types import Group, Scalar

STEPS = 32
"""Steps that one is compared with, itself included."""


class LengthRatio:
    """Mean length of a step's answers over that of the last steps together. Part of a checkpoint."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, int]] = deque(maxlen=STEPS)
        """(tokens, answers) of each step."""

    def measure(self, groups: Sequence[Group]) -> dict[str, float]:
        answers = [answer for group in groups for answer in group.trajectories if answer.num_tokens]
        if not answers:
            return {}
        tokens = sum(answer.num_tokens for answer in answers)
        self._steps.append((tokens, len(answers)))
        all_tokens, all_answers = (sum(column) for column in zip(*self._steps, strict=True))
        return {"flow/length_ratio": (tokens / len(answers)) / (all_tokens / all_answers)}

    def state(self) -> list[Scalar]:
        return [number for step in self._steps for number in step]

    def load_state(self, state: Sequence[Scalar]) -> None:
        numbers = [int(number) for number in state]
        self._steps = deque(zip(numbers[::2], numbers[1::2], strict=True), maxlen=STEPS)
