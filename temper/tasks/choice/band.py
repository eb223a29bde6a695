"""band: prompts that are neither solved nor hopeless come first, by the learnability of their running pass rate."""

from __future__ import annotations

from collections.abc import Collection

from temper.errors import UserError
from temper.tasks.choice.chooser import Chooser, Look
from temper.types import PromptHistory


class Band(Chooser):
    """A prompt whose running pass rate lies outside [low, high] is skipped with probability `skip`, each time anew: it
    comes back, and is measured again, one time in 1 / (1 - skip). Prompts that were never seen always pass."""

    name = "band"

    def __init__(self, *, low: float = 0.1, high: float = 0.9, skip: float = 0.9) -> None:
        """`low`, `high`: running pass rates between which prompts are always drawn, both ends included. `skip`:
        probability with which others are passed over, at least 0 and below 1: at 1 a prompt once out would be lost."""
        if not 0 <= low <= high <= 1:
            raise UserError(f"data.choose: {self.name}: low={low:g} and high={high:g} must be in order within 0 and 1")
        if not 0 <= skip < 1:
            raise UserError(
                f"data.choose: {self.name}: skip={skip:g} must be at least 0 and below 1: at 1 a prompt that is once "
                f"out never comes back. To leave solved prompts out for good, use no_positive_resampling"
            )
        self._low, self._high, self._skip = low, high, skip
        self._num_rated = self._num_inside = 0

    def is_inside(self, history: PromptHistory | None) -> bool:
        return history is None or history.rate is None or self._low <= history.rate <= self._high

    def look_around(self, known: Collection[PromptHistory], step: int) -> None:
        rated = [history for history in known if history.rate is not None]
        self._num_rated, self._num_inside = len(rated), sum(map(self.is_inside, rated))

    def wants(self, look: Look) -> bool:
        return self.is_inside(look.history) or look.chance(self.name) >= self._skip

    def measure(self) -> dict[str, float]:
        return {"data/in_band": self._num_inside / self._num_rated} if self._num_rated else {}
