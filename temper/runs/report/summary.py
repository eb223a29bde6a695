"""What a report says of a run and of its stages, as numbers.

Owns: these types. Refuses: reading a run (report.py), words (stage_table.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from temper.types import EvaluationResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What rejection sampling made."""

    rows: int
    prompts: int
    share: float
    """Share of all answers that were kept."""
    mean_reward: float
    best_reward: float
    """Mean over the groups of the highest reward in each: best-of-N, with N the group's size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreChange:
    """Held-out score at both ends of a stretch of training."""

    name: str
    first: EvaluationResult
    last: EvaluationResult
    differs: tuple[str, ...]
    """Parts of the budget that are not equal; with any, the two scores do not compare."""

    @property
    def gain(self) -> float | None:
        return None if self.differs else self.last.score - self.first.score

    @property
    def gain_interval(self) -> tuple[float, float] | None:
        """95%, from the intervals of the two scores as if other prompts had been asked (Zou and Donner's MOVER): both
        are of the same prompts, which can only make it wider than it need be. None where there is no gain."""
        if self.gain is None or (self.first.stage, self.first.step) == (self.last.stage, self.last.step):
            return None
        below = math.hypot(self.last.score - self.last.low, self.first.high - self.first.score)
        above = math.hypot(self.last.high - self.last.score, self.first.score - self.first.low)
        return self.gain - below, self.gain + above


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a stretch of training cost."""

    num_steps: int
    seconds: Mapping[str, float]
    """By phase."""
    tokens_drawn: int
    tokens_trained: int
    prompts_trained: int
    """Distinct tasks."""
    groups_trained: int
    groups_dropped: Mapping[str, int]
    """By reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    stage: int
    name: str
    scores: tuple[ScoreChange, ...]
    work: Work
    reward: tuple[float | None, ...]
    """By step; empty for supervised training."""
    degenerate: tuple[float | None, ...]
    """By step, the share of groups whose rewards are all equal; empty for supervised training."""
    peak_memory_bytes: float | None
    """Most that was held at once in this stage; None before its first step."""
    peak_is_since_start: bool
    """Whether the system could not start its count anew: then earlier stages are in it."""
    starts_from: str
    """The earlier stage whose model it takes, "first" for the run's; empty: it goes on from the one before."""
    kept: Kept | None
    """What rejection sampling made; None for other stages."""
    idle: Mapping[str, float]
    """By side, trainer and sampler: the share of its wall time in which that had nothing to do. Empty: it draws nothing
    that it trains on, or nobody measured."""
