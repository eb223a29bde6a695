"""What the sampler counted during the last step, for more than one reader.

Owns: the last answer of Sampler.stats(), which counts from call to call and so may be asked by one reader only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping


class Pressure:
    def __init__(self, stats: Callable[[], Mapping[str, float]]) -> None:
        self._stats = stats
        self._latest: Mapping[str, float] = {}

    def read(self) -> Mapping[str, float]:
        """Asks the sampler, once a step."""
        self._latest = self._stats()
        return self._latest

    def latest(self) -> Mapping[str, float]:
        """What it said last; empty before the first step."""
        return self._latest
