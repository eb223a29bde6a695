"""Groups between sampler and trainer, and the staleness bound.

Owns: who may start, and waiting until a step is full. The rule: a group may start only while (S + version + 1) *
groups_per_step groups or fewer have ever been admitted for training. Whatever is taken next (orders.py), the steps up
to its deadline can then train everybody who was admitted before it, so no token is ever older than S versions and no
group is dropped for age.
Everything is counted as it happens: a group costs the same however many others wait.
Refuses: running episodes (source.py), the order in which groups are trained (orders.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from temper.calls import describe_waiting
from temper.errors import BackendError
from temper.rollout.drops import explain_drops, tell_drops
from temper.rollout.orders import ORDERS, Order, OrderName, Slot
from temper.types import Group

NOT_TRAINED = "dropped:the run ended"
"""What became of a group that was ready when its run ended."""
FIRST_TOLD = 3
"""Steps' worth of drops for one step before anybody is told: fewer are usual where equal rewards are replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroups:
    """What one step consumes, in draw order."""

    groups: tuple[Group, ...]
    dropped: tuple[tuple[Group, str], ...]

    @property
    def everything(self) -> tuple[Group, ...]:
        """What is trained, and then what is dropped."""
        return (*self.groups, *(group for group, _ in self.dropped))


class Buffer:
    """Draws that are under way or wait to be trained. All methods run in one event loop."""

    def __init__(
        self, *, groups_per_step: int, max_staleness: int, max_rounds: int, version: int = 0, order: OrderName = "draw",
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        """tell: hears of a step for which many groups are dropped, before it is given up."""
        self._groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self._version = version
        # Not 0 after a restart: the formula would admit a burst of version * groups_per_step groups.
        self._num_accepted = version * groups_per_step
        self.order = order
        self._max_dropped = groups_per_step * max_rounds
        self._order: Order = ORDERS[order](
            groups_per_step=groups_per_step, max_staleness=max_staleness, max_dropped=self._max_dropped
        )
        self._running: dict[int, Slot] = {}
        self._num_settled = 0
        self.num_finished = 0
        """Groups that wait to be trained."""
        self._num_dropped = 0
        """Groups that will not be trained and are not consumed yet; of all draws."""
        self._tell = tell
        self._told_at = FIRST_TOLD * groups_per_step
        """So many drops are told next."""
        self.lead = (max_staleness + 1) * groups_per_step
        """Groups that may be under way for the next step, finished ones included."""
        self.most_running: int | None = None
        """Groups that may run at once. None: no limit but the lead."""
        self.refills_together = max_staleness == 0
        """Whether nothing starts while something runs: synchronous refills start together, so that what is batched
        together, and with it every bit, reproduces."""
        self._changed = asyncio.Condition()

    @property
    def version(self) -> int:
        """Version of the newest weights that are live."""
        return self._version

    @property
    def running(self) -> list[int]:
        """Draws that run."""
        return [*self._running]

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def is_ready(self) -> bool:
        """Whether a step can be filled now."""
        return self._order.is_ready(self._version)

    @property
    def room(self) -> int:
        """How many groups may start now."""
        if self.refills_together and self._running:
            return 0
        if self._order.is_clogged:
            return 0  # nothing but drops, and they fill the memory
        num_trained = self._version * self._groups_per_step
        most = num_trained + self.lead
        if self.max_staleness:
            most = min(most, num_trained + (self.max_staleness + 1) * self._groups_per_step)
        elif self._num_accepted > num_trained:
            return 0  # the step is full: what starts now would be too old for the next
        room = most - self._num_accepted - self.num_running - self.num_finished
        return room if self.most_running is None else min(room, self.most_running - self.num_running)

    async def wait_for_room(self, seconds: float) -> int:
        async with self._changed:
            await self._wait(lambda: self.room > 0, seconds)
            return self.room

    async def start(self, draw: int) -> None:
        async with self._changed:
            assert draw not in self._running, f"draw {draw} is under way"
            slot = Slot(draw, self._version)
            self._order.start(slot)
            self._running[draw] = slot

    async def finish(self, group: Group, dropped: str | None) -> None:
        """A group is done. Dropped, it frees its place at once."""
        async with self._changed:
            slot = self._running.pop(group.draw)
            slot.group, slot.dropped, slot.place = group, dropped, self._num_settled
            self._num_settled += 1
            self.num_finished += dropped is None
            self._num_dropped += dropped is not None
            self._order.settle(slot)
            self._tell_drops()
            self._changed.notify_all()

    async def withdraw(self, draw: int) -> None:
        """A group that runs is given back: it will be started again."""
        async with self._changed:
            self._order.withdraw(self._running.pop(draw))
            self._changed.notify_all()

    async def withdraw_finished(self) -> list[Group]:
        """The groups that wait to be trained are given back."""
        async with self._changed:
            slots = [slot for slot in self._order.settled() if slot.dropped is None]
            for slot in slots:
                self._order.withdraw(slot)
            self.num_finished -= len(slots)
            self._changed.notify_all()
            return [slot.group for slot in slots if slot.group is not None]

    async def steer(self, *, lead: int | None, most_running: int | None) -> None:
        """How many groups may be under way from now on, within the bound; None: as many as that admits."""
        async with self._changed:
            self.lead = (self.max_staleness + 1) * self._groups_per_step if lead is None else lead
            self.most_running = most_running
            self._changed.notify_all()

    async def take(self, seconds: float) -> StepGroups:
        """The next groups_per_step trainable groups, in the buffer's order."""
        async with self._changed:
            await self._wait(lambda: self.is_ready or self._order.is_hopeless(self._version), seconds)
            if not self.is_ready:
                _, dropped = _sorted_out(self._order.settled())
                raise BackendError(
                    f"{len(dropped)} groups were rolled and dropped without filling one step of "
                    f"{self._groups_per_step}. {explain_drops(dropped)}"
                )
            groups, dropped = _sorted_out(self._order.take(self._version))
            self._num_accepted += len(groups)
            self.num_finished -= len(groups)
            self._num_dropped -= len(dropped)
            self._check_age(groups)
            return StepGroups(groups=groups, dropped=dropped)

    def settled(self) -> list[tuple[Group, str]]:
        """Groups that are done and not taken, in draw order, with what became of them."""
        outcomes = [
            (slot.group, f"dropped:{slot.dropped}" if slot.dropped else NOT_TRAINED) for slot in self._order.settled()
        ]
        return [(group, outcome) for group, outcome in outcomes if group is not None]

    async def release(self, version: int) -> None:
        """New weights are live: the bound moves on."""
        async with self._changed:
            self._version = version
            self._changed.notify_all()

    def _tell_drops(self) -> None:
        """After as many drops as were never told: a run that drops some in every step is not told in every step."""
        # Past the bound nothing is left to be said in time: the run only waits for the draws before them.
        if self._told_at <= self._num_dropped <= self._max_dropped:
            self._told_at *= 2
            _, dropped = _sorted_out(self._order.settled())
            self._tell(tell_drops(dropped, most=self._max_dropped))

    def _check_age(self, groups: tuple[Group, ...]) -> None:
        """The second enforcement, at consumption: what admission promised must hold for every token."""
        for group in groups:
            age = self._version - group.oldest_version
            if age > self.max_staleness:
                raise BackendError(f"group {group.id} is {age} versions old, the bound is {self.max_staleness}")

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


def _sorted_out(slots: Sequence[Slot]) -> tuple[tuple[Group, ...], tuple[tuple[Group, str], ...]]:
    """What is trained of settled draws, and what is not."""
    groups = tuple(slot.group for slot in slots if slot.group and slot.dropped is None)
    return groups, tuple((slot.group, slot.dropped) for slot in slots if slot.group and slot.dropped is not None)
