"""no_positive_resampling: what is solved is not asked again. Polaris; ScaleRL, arXiv 2510.13786."""

from __future__ import annotations

from collections.abc import Collection

from temper.errors import UserError
from temper.tasks.choice.chooser import Chooser
from temper.types import PromptHistory


class NoPositiveResampling(Chooser):
    """A prompt whose running pass rate is at or above the threshold is not drawn again. It is out for good: without new
    draws its rate does not change."""

    name = "no_positive_resampling"

    def __init__(self, *, threshold: float = 0.9) -> None:
        """`threshold`: running pass rate from which a prompt counts as solved, above 0 and at most 1."""
        if not 0 < threshold <= 1:
            raise UserError(f"data.choose: {self.name}: threshold={threshold:g} must be above 0 and at most 1")
        self._threshold = threshold
        self._num_known = self._num_solved = 0

    def is_out(self, history: PromptHistory) -> bool:
        return history.rate is not None and history.rate >= self._threshold

    def look_around(self, known: Collection[PromptHistory], step: int) -> None:
        self._num_known = len(known)
        self._num_solved = sum(map(self.is_out, known))

    def measure(self) -> dict[str, float]:
        return {"data/solved_share": self._num_solved / self._num_known} if self._num_known else {}
