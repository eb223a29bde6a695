"""Where the time of a step goes, measured from report to report.

Owns: the clock of the loop. Refuses: what phases mean (time_split.py).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping

from temper.runs.time_split import balanced


class Stopwatch:
    """Every lap gives the seconds since the last one to a phase. What no phase claims is "other" in the report."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._lap = self._reported = time.monotonic()

    def skip(self) -> None:
        """The seconds since the last lap belong to no phase."""
        self._lap = time.monotonic()

    def lap(self, phase: str, inside: Mapping[str, float] | None = None) -> None:
        """inside: phases that whoever worked has measured; `phase` gets the rest."""
        now = time.monotonic()
        for name, seconds in (inside or {}).items():
            self._seconds[name] += seconds
        self._seconds[phase] += now - self._lap - sum((inside or {}).values())
        self._lap = now

    def lap_as(self, seconds: Mapping[str, float]) -> None:
        """Whoever worked has measured it all; what is missing since the last lap is nobody's."""
        for name, spent in seconds.items():
            self._seconds[name] += spent
        self._lap = time.monotonic()

    def report(self) -> dict[str, float]:
        """Seconds by phase since the last report, which add up to the wall clock up to the last lap. Starts anew."""
        found = balanced(dict(self._seconds), self._lap - self._reported)
        self._seconds.clear()
        self._reported = self._lap
        return found
