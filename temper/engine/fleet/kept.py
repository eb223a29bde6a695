"""A fleet that outlives its stage, where that begins anew with other trainers.

Owns: which fleet rests, and who may take it. Refuses: deciding that a stage begins anew (commands/training/train.py).
"""

from __future__ import annotations

from collections.abc import Callable

from temper.engine.fleet.fleet import Fleet
from temper.protocols import Sampler


class KeptFleet:
    """Lives as long as a run, in one event loop."""

    def __init__(self) -> None:
        self._used: tuple[object, Fleet] | None = None
        self._resting: tuple[object, Fleet] | None = None
        """What each was made for, and the fleet."""

    def take(self, made_for: object, make: Callable[[], Fleet]) -> Fleet:
        """The one that rests, if it was made for the same; else a new one."""
        if self._resting is not None and self._resting[0] == made_for:
            self._used, self._resting = self._resting, None
        else:
            self._used = made_for, make()
        return self._used[1]

    async def keep(self, sampler: Sampler) -> bool:
        """Lets it rest in place of closing it. False: it is no fleet that was taken here."""
        if self._used is None or self._used[1] is not sampler:
            return False
        await self._used[1].rest()
        self._used, self._resting = None, self._used
        return True

    async def close(self) -> None:
        """Ends one that rests and that nobody took."""
        if self._resting is not None:
            await self._resting[1].close()
            self._resting = None
