"""In which order groups are trained: as they were drawn, or as they finish.

Owns: what of the settled draws a step takes, and whom it waits for. "draw" needs no choice: a step takes the first
groups whose earlier draws are all settled. "finished" takes whoever finished first, as long as everybody else can still
be trained in time. A group that started by the weights of version v must be trained by version v + S, its deadline. The
steps at versions V to V + k train (k + 1) * groups_per_step groups, so the step at V takes at least as many groups with
deadlines up to V + k as would otherwise be too many for the k steps after it, and waits for one where it has to.
Refuses: who may start, and waiting (buffer.py).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import Literal, Protocol

from temper.types import Group

OrderName = Literal["draw", "finished"]


@dataclass(slots=True)
class Slot:
    """One draw. `group` is None while it runs; `dropped` says why it will not be trained."""

    draw: int
    version: int = 0
    """Version of the weights when it started. No token of it is older."""
    group: Group | None = None
    dropped: str | None = None
    place: int = 0
    """Number of groups that finished before it."""

    @property
    def oldest_version(self) -> int:
        """Oldest version that may have drawn one of its tokens."""
        return self.version if self.group is None else max(self.version, self.group.oldest_version)


class Order(Protocol):
    """All draws that were started and are not consumed."""

    def start(self, slot: Slot) -> None: ...
    def settle(self, slot: Slot) -> None:
        """Its group is done, or dropped."""
        ...

    def withdraw(self, slot: Slot) -> None:
        """Its draw is given back: it will be started again."""
        ...

    def is_ready(self, version: int) -> bool:
        """Whether the step at this version can be filled now."""
        ...

    def is_hopeless(self, version: int) -> bool:
        """Whether too many groups were dropped without filling the step."""
        ...

    @property
    def is_clogged(self) -> bool:
        """Whether so many drops wait for a step that nothing more may start."""
        ...

    def take(self, version: int) -> list[Slot]:
        """What the step consumes; it is ready."""
        ...

    def settled(self) -> list[Slot]:
        """Slots that are done and not taken, in draw order."""
        ...


class DrawOrder:
    """Implements Order: the n-th group that is trained is the n-th that was drawn, among those that are not dropped."""

    def __init__(self, *, groups_per_step: int, max_staleness: int, max_dropped: int) -> None:
        self._groups_per_step, self._max_dropped = groups_per_step, max_dropped
        self._settled: deque[Slot] = deque()
        """The draws before the first that runs."""
        self._open: deque[Slot] = deque()
        """From the first draw that runs on."""
        self._num_ready = 0
        """Groups among the settled draws that wait to be trained."""
        self._num_open_drops = 0

    def start(self, slot: Slot) -> None:
        newest = self._open[-1].draw if self._open else self._settled[-1].draw if self._settled else -1
        assert slot.draw > newest, f"draw {slot.draw} started after draw {newest}"
        self._open.append(slot)

    def settle(self, slot: Slot) -> None:
        self._num_open_drops += slot.dropped is not None
        while self._open and self._open[0].group is not None:
            first = self._open.popleft()
            self._num_ready += first.dropped is None
            self._num_open_drops -= first.dropped is not None
            self._settled.append(first)

    def withdraw(self, slot: Slot) -> None:
        raise AssertionError('in draw order nobody is overtaken: giving draws back needs order "finished"')

    def is_ready(self, version: int) -> bool:
        return self._num_ready >= self._groups_per_step

    def is_hopeless(self, version: int) -> bool:
        """Later draws do not count: they are of other steps while this one is not full."""
        return not self.is_ready(version) and len(self._settled) - self._num_ready > self._max_dropped

    @property
    def is_clogged(self) -> bool:
        return self._num_open_drops > self._max_dropped  # behind one slow draw: useless before it ends

    def take(self, version: int) -> list[Slot]:
        taken, missing = list[Slot](), self._groups_per_step
        while missing:
            taken.append(self._settled.popleft())
            missing -= taken[-1].dropped is None
        self._num_ready -= self._groups_per_step
        return taken

    def settled(self) -> list[Slot]:
        return [slot for slot in (*self._settled, *self._open) if slot.group is not None]


class FinishedOrder:
    """Implements Order: whoever finishes first is trained first, and nobody misses a deadline.

    Without staleness there are no deadlines: what a step leaves over is given back and drawn anew.
    """

    def __init__(self, *, groups_per_step: int, max_staleness: int, max_dropped: int) -> None:
        self._groups_per_step, self._max_staleness, self._max_dropped = groups_per_step, max_staleness, max_dropped
        self._waiting: Counter[int] = Counter()
        """Groups that run or are ready, by deadline."""
        self._ready: dict[int, deque[Slot]] = defaultdict(deque)
        """Groups to be trained, by deadline, in the order in which they finished."""
        self._dropped: list[Slot] = []

    def start(self, slot: Slot) -> None:
        self._waiting[self._deadline(slot.version)] += 1

    def settle(self, slot: Slot) -> None:
        self._forget(self._deadline(slot.version))
        if slot.dropped is not None:
            self._dropped.append(slot)
            return
        deadline = self._deadline(slot.oldest_version)  # later than it was, if its first token had to wait
        self._waiting[deadline] += 1
        self._ready[deadline].append(slot)

    def withdraw(self, slot: Slot) -> None:
        deadline = self._deadline(slot.oldest_version)
        self._forget(deadline)
        if slot.group is not None:
            self._ready[deadline].remove(slot)
            self._forget_empty(deadline)

    def is_ready(self, version: int) -> bool:
        is_full = sum(map(len, self._ready.values())) >= self._groups_per_step
        return is_full and not self._waits_for_late(version)

    def is_hopeless(self, version: int) -> bool:
        """Drops that came while the step waits for one late group do not count before that has ended."""
        return self.is_clogged and not self.is_ready(version) and not self._waits_for_late(version)

    @property
    def is_clogged(self) -> bool:
        return len(self._dropped) > self._max_dropped

    def take(self, version: int) -> list[Slot]:
        taken = list[Slot]()
        for deadline, num_needed in self._needed(version):
            while len(taken) < num_needed:
                taken.append(self._pop_first(deadline))
        while len(taken) < self._groups_per_step:
            taken.append(self._pop_first(max(self._ready)))
        dropped, self._dropped = self._dropped, []
        return sorted((*taken, *dropped), key=lambda slot: slot.draw)

    def settled(self) -> list[Slot]:
        ready = (slot for slots in self._ready.values() for slot in slots)
        return sorted((*ready, *self._dropped), key=lambda slot: slot.draw)

    def _deadline(self, version: int) -> int:
        """Last version at which such a group may be trained."""
        return version + self._max_staleness

    def _needed(self, version: int) -> list[tuple[int, int]]:
        """(deadline, how many groups with this or an earlier deadline the step must take), earliest deadline first."""
        if self._max_staleness == 0:
            return []
        needed, num_waiting = [], 0
        for deadline in sorted(self._waiting):
            num_waiting += self._waiting[deadline]
            later_steps = max(0, deadline - version)
            needed.append((deadline, min(num_waiting - later_steps * self._groups_per_step, self._groups_per_step)))
        return needed

    def _waits_for_late(self, version: int) -> bool:
        """Whether a group that the step must take still runs."""
        num_ready = 0
        for deadline, num_needed in self._needed(version):
            num_ready += len(self._ready.get(deadline, ()))
            if num_needed > num_ready:
                return True
        return False

    def _pop_first(self, deadline: int) -> Slot:
        """Of the groups with this or an earlier deadline, that which finished first."""
        in_time = [own for own in self._ready if own <= deadline]
        first = min(in_time, key=lambda own: self._ready[own][0].place)
        self._forget(first)
        slot = self._ready[first].popleft()
        self._forget_empty(first)
        return slot

    def _forget_empty(self, deadline: int) -> None:
        if not self._ready[deadline]:
            del self._ready[deadline]

    def _forget(self, deadline: int) -> None:
        self._waiting[deadline] -= 1
        if not self._waiting[deadline]:
            del self._waiting[deadline]


ORDERS: dict[OrderName, type[DrawOrder] | type[FinishedOrder]] = {"draw": DrawOrder, "finished": FinishedOrder}
