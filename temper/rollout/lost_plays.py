"""Plays of an episode that were lost with the process of its environment, and whether it is begun anew.

Owns: what is told of them, and which of them the episode may have caused. Refuses: playing (episode.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from temper.errors import EnvironmentLost
from temper.protocols import Env, MayBeLost
from temper.types import Event, EventKind, lasting

MOST_SUSPECTED = 3
"""Plays of an episode with a call under way when they were lost: it may be the one that ends its processes. The last of
them has a process of its own, so that no other episode ends it, and it ends no other."""


@dataclass(frozen=True, slots=True)
class LostPlays:
    """Those of one episode so far."""

    events: tuple[Event, ...] = ()
    """One that tells of each, with its cost, and what it did to the world."""
    num_suspected: int = 0

    def ends_with(self, loss: EnvironmentLost) -> bool:
        """Whether this loss is the end of the episode."""
        return self.num_suspected + loss.is_suspect == MOST_SUSPECTED

    def add(self, loss: EnvironmentLost, events: Sequence[Event]) -> LostPlays:
        """events: all of the play."""
        number = 1 + sum(event.kind is EventKind.REPLAYED for event in self.events)
        cost = math.fsum(event.cost for event in events)
        told = Event(kind=EventKind.REPLAYED, name=f"play {number}", detail=str(loss), cost=cost)
        done = lasting(events, f"play {number}, whose process was lost")
        free = (dataclasses.replace(event, cost=0.0) for event in done)  # or it would be counted twice
        return LostPlays((*self.events, told, *free), self.num_suspected + loss.is_suspect)

    def prepare(self, env: Env) -> None:
        """For an environment that plays after them."""
        if self.events and isinstance(env, MayBeLost):
            spent = math.fsum(event.cost for event in self.events)
            env.replay(spent=spent, alone=self.num_suspected == MOST_SUSPECTED - 1)
