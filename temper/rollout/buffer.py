"""Groups between sampler and trainer, and the staleness bound.

Owns: who may start and what is trained next. The rule: groups are trained in draw order, and a group may start only
while (S + version + 1) * groups_per_step groups or fewer have ever been admitted for training. In draw order the
n-th accepted group is trained by step ceil(n / groups_per_step), so no token is ever older than S versions, no group is
dropped for age, and fast prompts are not favoured over slow ones.
Refuses: running episodes (roller.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from temper.errors import BackendError
from temper.types import Group

NOT_TRAINED = "dropped:the run ended"
"""What became of a group that was ready when its run ended."""


@dataclass(slots=True)
class Slot:
    """One draw. `group` is None while it runs; `dropped` says why it will not be trained."""

    group: Group | None = None
    dropped: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What one step consumes: a prefix of the draws."""

    groups: tuple[Group, ...]
    dropped: tuple[tuple[Group, str], ...]


class Buffer:
    """Slots in draw order. All methods run in one event loop."""

    def __init__(self, *, groups_per_step: int, max_staleness: int, max_rounds: int, version: int = 0) -> None:
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._max_dropped = groups_per_step * max_rounds
        self._version = version
        # Not 0 after a restart: the formula would admit a burst of version * groups_per_step groups.
        self._num_accepted = version * groups_per_step
        self._slots: dict[int, Slot] = {}
        self._changed = asyncio.Condition()

    @property
    def num_running(self) -> int:
        return sum(slot.group is None for slot in self._slots.values())

    @property
    def num_finished(self) -> int:
        return sum(slot.group is not None and slot.dropped is None for slot in self._slots.values())

    @property
    def room(self) -> int:
        """How many groups may start now."""
        if self._max_staleness == 0 and self.num_running:
            # Synchronous refills start together, so that what is batched together, and with it every bit, reproduces.
            return 0
        admitted = self._num_accepted + self.num_running + self.num_finished
        return (self._max_staleness + self._version + 1) * self._groups_per_step - admitted

    async def wait_for_room(self, seconds: float) -> int:
        async with self._changed:
            await self._wait(lambda: self.room > 0, seconds)
            return self.room

    async def start(self, draw: int) -> None:
        async with self._changed:
            assert draw not in self._slots, f"draw {draw} started twice"
            self._slots[draw] = Slot()

    async def finish(self, group: Group, dropped: str | None) -> None:
        """A group is done. Dropped, it frees its place at once."""
        async with self._changed:
            self._slots[group.draw] = Slot(group=group, dropped=dropped)
            self._changed.notify_all()

    async def take(self, seconds: float) -> Taken:
        """The next groups_per_step trainable groups in draw order, once every earlier draw is settled."""
        async with self._changed:
            await self._wait(lambda: self._prefix() is not None or self._num_dropped() > self._max_dropped, seconds)
            prefix = self._prefix()
            if prefix is None:
                raise BackendError(
                    f"{self._num_dropped()} groups were rolled and dropped without filling one step of "
                    f"{self._groups_per_step}: {self._reasons()}. Use easier or harder tasks, a larger group, or "
                    f"rollout.drop_degenerate=false"
                )
            taken = [self._slots.pop(draw) for draw in prefix]
            groups = tuple(slot.group for slot in taken if slot.group and slot.dropped is None)
            dropped = tuple((slot.group, slot.dropped) for slot in taken if slot.group and slot.dropped is not None)
            self._num_accepted += len(groups)
            self._check_age(groups)
            return Taken(groups=groups, dropped=dropped)

    def settled(self) -> list[tuple[Group, str]]:
        """Groups that are done and not taken, in draw order, with what became of them."""
        slots = [self._slots[draw] for draw in sorted(self._slots)]
        outcomes = [(slot.group, f"dropped:{slot.dropped}" if slot.dropped else NOT_TRAINED) for slot in slots]
        return [(group, outcome) for group, outcome in outcomes if group is not None]

    async def release(self, version: int) -> None:
        """New weights are live: the bound moves on."""
        async with self._changed:
            self._version = version
            self._changed.notify_all()

    def _prefix(self) -> list[int] | None:
        """The shortest prefix of settled draws that fills a step."""
        prefix, accepted = [], 0
        for draw in sorted(self._slots):
            slot = self._slots[draw]
            if slot.group is None:
                return None
            prefix.append(draw)
            accepted += slot.dropped is None
            if accepted == self._groups_per_step:
                return prefix
        return None

    def _num_dropped(self) -> int:
        return sum(slot.dropped is not None for slot in self._slots.values())

    def _reasons(self) -> str:
        reasons = [slot.dropped for slot in self._slots.values() if slot.dropped]
        return ", ".join(f"{reasons.count(reason)} {reason}" for reason in sorted(set(reasons)))

    def _check_age(self, groups: tuple[Group, ...]) -> None:
        """The second enforcement, at consumption: what admission promised must hold for every token."""
        for group in groups:
            age = self._version - group.oldest_version
            if age > self._max_staleness:
                raise BackendError(f"group {group.id} is {age} versions old, the bound is {self._max_staleness}")

    async def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait_for(condition)
        except TimeoutError as error:
            raise BackendError(
                f"no progress for {seconds:g} s: {self.num_running} groups running, {self.num_finished} finished, "
                f"{self._num_dropped()} dropped. Raise rollout.step_seconds if the tasks really take this long"
            ) from error
