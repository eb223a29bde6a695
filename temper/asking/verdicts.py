"""What was said of episodes by those who judge them.

Owns: one record per verdict until somebody takes it, and counts. Refuses: judging, and writing (runs/store/).
"""

from __future__ import annotations

from collections import Counter, deque

from temper.types import Scalar, Score, Trajectory

MAX_RECORDS = 100_000
"""Kept until someone takes them; older ones are forgotten."""

Record = dict[str, Scalar]


class RecordLog:
    """What was judged, by whom, how: one record per verdict, and counts."""

    def __init__(self) -> None:
        self._records: deque[Record] = deque(maxlen=MAX_RECORDS)
        self._counts: Counter[str] = Counter()

    def add(self, trajectory: Trajectory, score: Score, **detail: Scalar) -> Score:
        """Notes the score and hands it back."""
        outcome: dict[str, Scalar] = {"kind": score.kind.value}
        outcome |= {"reason": score.reason or ""} if score.value is None else {"value": score.value}
        place: dict[str, Scalar] = {"task": trajectory.task_id, "group": trajectory.group_id, "index": trajectory.index}
        self._records.append({**place, **outcome, **detail})
        self.count(score.kind.value)
        return score

    def count(self, what: str, times: int = 1) -> None:
        self._counts[what] += times

    def take(self) -> list[Record]:
        """The records since the last call."""
        records = list(self._records)
        self._records.clear()
        return records

    def metrics(self) -> dict[str, float]:
        """Counts since the start."""
        return {name: float(times) for name, times in sorted(self._counts.items())}
