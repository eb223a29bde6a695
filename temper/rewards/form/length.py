"""The reward for a length in tokens.

Owns: kind "length". Refuses: penalties that need the group or the sampling limit; those are shaping, in objectives.
"""

from __future__ import annotations

from temper.errors import UserError
from temper.protocols import Reward
from temper.types import Score, Task, Trajectory


def within(count: int, low: int, high: int, margin: int) -> float:
    """1 in [low, high]; outside it falls in a straight line to 0 at `margin` tokens away."""
    distance = max(low - count, count - high, 0)
    if not distance:
        return 1.0
    return max(0.0, 1.0 - distance / margin) if margin else 0.0


class LengthReward(Reward):
    """Whether the model drew between low and high tokens, over all turns; margin is how soon it is worth nothing."""

    name = "length"

    def __init__(self, *, high: int, low: int = 0, margin: int = 0) -> None:
        if not 0 <= low <= high or margin < 0:
            raise UserError(
                f'reward "length": low={low}, high={high}, margin={margin} do not fit. '
                "Use 0 <= low <= high and margin >= 0, e.g. low = 64, high = 256, margin = 64."
            )
        self._low, self._high, self._margin = low, high, margin

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        return Score.of(within(trajectory.num_tokens, self._low, self._high, self._margin))
