"""Groups between sampler and trainer, and the staleness bound.

Owns: who may start and what is trained next. The rule: groups are trained in draw order, and a group may start only
while (S + version + 1) * groups_per_step groups or fewer have ever been admitted for training. In draw order the
n-th accepted group is trained by step ceil(n / groups_per_step), so no token is ever older than S versions, no group is
dropped for age, and fast prompts are not favoured over slow ones.
Everything is counted as it happens: a group costs the same however many others wait.
Refuses: running episodes (source.py).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from temper.calls import describe_waiting
from temper.errors import BackendError
from temper.rollout.drops import explain_drops
from temper.types import Group

NOT_TRAINED = "dropped:the run ended"
"""What became of a group that was ready when its run ended."""


@dataclass(slots=True)
class Slot:
    """One draw. `group` is None while it runs; `dropped` says why it will not be trained."""

    draw: int
    group: Group | None = None
    dropped: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroups:
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
        self._settled: deque[Slot] = deque()
        """The draws before the first that runs."""
        self._open: deque[Slot] = deque()
        """From the first draw that runs on."""
        self._running: dict[int, Slot] = {}
        self.num_finished = 0
        """Groups that wait to be trained."""
        self._num_ready = 0
        """Groups among the settled draws that wait to be trained."""
        self._num_dropped = 0
        """Groups that will not be trained and are not consumed yet; of all draws."""
        self._changed = asyncio.Condition()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def is_ready(self) -> bool:
        """Whether the settled draws fill a step."""
        return self._num_ready >= self._groups_per_step

    @property
    def room(self) -> int:
        """How many groups may start now."""
        if self._max_staleness == 0 and self._running:
            # Synchronous refills start together, so that what is batched together, and with it every bit, reproduces.
            return 0
        if self._num_dropped - self._num_settled_drops > self._max_dropped:
            return 0  # behind one slow draw, nothing but drops: useless before it ends, and they fill the memory
        admitted = self._num_accepted + self.num_running + self.num_finished
        return (self._max_staleness + self._version + 1) * self._groups_per_step - admitted

    @property
    def _num_settled_drops(self) -> int:
        return len(self._settled) - self._num_ready

    async def wait_for_room(self, seconds: float) -> int:
        async with self._changed:
            await self._wait(lambda: self.room > 0, seconds)
            return self.room

    async def start(self, draw: int) -> None:
        async with self._changed:
            newest = self._open[-1].draw if self._open else self._settled[-1].draw if self._settled else -1
            assert draw > newest, f"draw {draw} started after draw {newest}"
            slot = Slot(draw)
            self._open.append(slot)
            self._running[draw] = slot

    async def finish(self, group: Group, dropped: str | None) -> None:
        """A group is done. Dropped, it frees its place at once."""
        async with self._changed:
            slot = self._running.pop(group.draw)
            slot.group, slot.dropped = group, dropped
            self.num_finished += dropped is None
            self._num_dropped += dropped is not None
            while self._open and self._open[0].group is not None:
                self._num_ready += self._open[0].dropped is None
                self._settled.append(self._open.popleft())
            self._changed.notify_all()

    async def take(self, seconds: float) -> StepGroups:
        """The next groups_per_step trainable groups in draw order, once every earlier draw is settled."""
        async with self._changed:
            await self._wait(lambda: self.is_ready or self._is_hopeless, seconds)
            if not self.is_ready:
                _, dropped = _sorted_out(self._settled)
                raise BackendError(
                    f"{len(dropped)} groups were rolled and dropped without filling one step of "
                    f"{self._groups_per_step}. {explain_drops(dropped)}"
                )
            taken, missing = list[Slot](), self._groups_per_step
            while missing:
                taken.append(self._settled.popleft())
                missing -= taken[-1].dropped is None
            groups, dropped = _sorted_out(taken)
            self._num_accepted += len(groups)
            self._num_ready -= len(groups)
            self.num_finished -= len(groups)
            self._num_dropped -= len(dropped)
            self._check_age(groups)
            return StepGroups(groups=groups, dropped=dropped)

    def settled(self) -> list[tuple[Group, str]]:
        """Groups that are done and not taken, in draw order, with what became of them."""
        slots = (*self._settled, *self._open)
        outcomes = [(slot.group, f"dropped:{slot.dropped}" if slot.dropped else NOT_TRAINED) for slot in slots]
        return [(group, outcome) for group, outcome in outcomes if group is not None]

    async def release(self, version: int) -> None:
        """New weights are live: the bound moves on."""
        async with self._changed:
            self._version = version
            self._changed.notify_all()

    @property
    def _is_hopeless(self) -> bool:
        """Too many drops in this step. Later draws do not count: they are of other steps while this one is not full."""
        return not self.is_ready and self._num_settled_drops > self._max_dropped

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
            waiting = describe_waiting()
            raise BackendError(
                f"no progress for {seconds:g} s: {self.num_running} groups running, {self.num_finished} finished, "
                f"{self._num_dropped} dropped. {f'Their episodes wait for: {waiting}. ' if waiting else ''}"
                f"Raise rollout.step_seconds if the tasks really take this long"
            ) from error


def _sorted_out(slots: deque[Slot] | list[Slot]) -> tuple[tuple[Group, ...], tuple[tuple[Group, str], ...]]:
    """What is trained of settled draws, and what is not."""
    groups = tuple(slot.group for slot in slots if slot.group and slot.dropped is None)
    return groups, tuple((slot.group, slot.dropped) for slot in slots if slot.group and slot.dropped is not None)
