"""How a sampler of a fleet stands, and how that changes.

Owns: which changes there are. Refuses: processes and clocks; everything here is a function of what happened.
A sampler that begins or comes back is stale until it was fed, and gets no request before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class Standing(Enum):
    STALE = "stale"
    """It lives and has no weights of the trainer's yet."""
    READY = "ready"
    LOST = "lost"
    """It ended, and another is being started in its place."""
    GONE = "gone"
    """It ended for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Of one place in the fleet, whoever fills it."""

    standing: Standing = Standing.STALE
    version: int | None = None
    """Of the weights that it has; None: not fed yet."""
    restarts: int = 0
    why: str = ""
    """How the last one ended."""

    def fed(self, version: int) -> Health:
        """It acknowledged a publication. What a dead sampler seems to say counts for nothing."""
        if self.standing in (Standing.LOST, Standing.GONE):
            return self
        return replace(self, standing=Standing.READY, version=version)

    def starved(self) -> Health:
        """The trainer that fed it is gone."""
        return replace(self, standing=Standing.STALE, version=None) if self.standing is Standing.READY else self

    def ended(self, why: str, *, max_restarts: int) -> Health:
        """Told once for each that ends; again changes nothing."""
        if self.standing in (Standing.LOST, Standing.GONE):
            return self
        standing = Standing.LOST if self.restarts < max_restarts else Standing.GONE
        return replace(self, standing=standing, version=None, why=why)

    def restarted(self) -> Health:
        assert self.standing is Standing.LOST, f"only who was lost comes back, not one that is {self.standing.value}"
        return replace(self, standing=Standing.STALE, restarts=self.restarts + 1)
