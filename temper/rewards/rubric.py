"""A reward made of weighted parts.

Owns: running the parts of one trajectory together and guarding their results. Refuses: what each part computes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from temper.protocols import RewardFn
from temper.rewards.score import combine, finite
from temper.types import Score, Task, Trajectory


class Rubric:
    """Weighted parts. A part that appears twice is told apart by a number: "format", "format_2"."""

    def __init__(self, parts: Sequence[tuple[RewardFn, float]]) -> None:
        self._parts: dict[str, RewardFn] = {}
        self._weights: dict[str, float] = {}
        for reward, weight in parts:
            copies = sum(other.name == reward.name for other in self._parts.values())
            name = f"{reward.name}_{copies + 1}" if copies else reward.name
            self._parts[name] = reward
            self._weights[name] = weight

    @property
    def weights(self) -> Mapping[str, float]:
        """By name of the part, as in the parts of a score."""
        return self._weights

    async def score(self, task: Task, trajectory: Trajectory) -> tuple[Score, dict[str, Score]]:
        """The total, and each part before weighting."""
        scores = await asyncio.gather(*(_guarded(part, task, trajectory) for part in self._parts.values()))
        parts = dict(zip(self._parts, scores, strict=True))
        return combine(parts, self._weights), parts

    def check(self, task: Task) -> str | None:
        """Why some part can never score this task, or None."""
        for name, part in self._parts.items():
            if (reason := part.check(task)) is not None:
                return f'reward "{name}" cannot score task {task.id}: {reason}'
        return None

    async def close(self) -> None:
        await asyncio.gather(*(part.close() for part in self._parts.values()))


async def _guarded(part: RewardFn, task: Task, trajectory: Trajectory) -> Score:
    """The rim where a reward's own fault becomes a recorded error."""
    try:
        return finite(await part.score(task, trajectory))
    except Exception as error:
        return Score.error(f"{type(error).__name__}: {error}")
