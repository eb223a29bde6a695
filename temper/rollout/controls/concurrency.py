"""A concurrency controller: how many groups run at once, and how many are under way, by what the last step showed.

Owns: two limits and the rules that move them. Out of cache, sequences are thrown out and computed again: fewer groups
run, by a quarter; with cache to spare and nobody waiting for a row, an eighth more. Finished groups that fill another
step grow old in the queue: fewer are started ahead, by a quarter of a step; with an empty queue as many more. Both are
functions of numbers alone, so equal runs are steered equally. Refuses: synchronous runs, and the bound (buffer.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from temper.rollout.buffer import StepGroups
from temper.rollout.controls.control import Control, Setting, State
from temper.types import Scalar

SPARE = 0.8
"""Share of the highest allowed use of the cache below which more groups may run."""


class Concurrency(Control):
    name = "concurrency"

    def __init__(self, setting: Setting, *, kv_use: float = 0.95, least: int = 1) -> None:
        super().__init__(setting)
        self._most = (setting.max_staleness + 1) * setting.groups_per_step
        if not 0 < kv_use <= 1:
            raise self.refuse(f"keeps the cache below kv_use={kv_use:g}. Use a share such as 0.9")
        if not 1 <= least <= self._most:
            raise self.refuse(f"lets least={least} groups run at least. Use 1 to {self._most}")
        if setting.max_staleness == 0:
            raise self.refuse(
                "steers how far the sampler runs ahead, and with rollout.max_staleness=0 it does not. Use "
                "max_staleness = 1 or more, or limit requests with engine.max_running"
            )
        self._kv_use, self._least = kv_use, least
        self._running = self._lead = self._most
        self._change = 0

    def most_running(self) -> int | None:
        return self._running

    def lead(self) -> int | None:
        return self._lead

    async def filled(self, taken: StepGroups, num_queued: int) -> None:
        before, per_step = self._running, self.setting.groups_per_step
        moved = next_running(before, self.setting.pressure(), self._kv_use)
        self._running = min(max(moved, self._least), self._most)
        self._change = self._running - before
        self._lead = min(max(next_lead(self._lead, num_queued, per_step), per_step), self._most)

    def metrics(self) -> dict[str, float]:
        return {
            "flow/running_limit": float(self._running),
            "flow/running_limit_change": float(self._change),
            "flow/lead_limit": float(self._lead),
        }

    def state(self) -> dict[str, Scalar | list[Scalar]]:
        return {"running": self._running, "lead": self._lead}

    def load_state(self, state: State) -> None:
        running, lead = state["running"], state["lead"]
        assert isinstance(running, int), "a number of groups"
        assert isinstance(lead, int), "a number of groups"
        # The recipe may have changed since.
        self._running = min(max(running, self._least), self._most)
        self._lead = min(max(lead, self.setting.groups_per_step), self._most)


def next_running(running: int, pressure: Mapping[str, float], kv_use: float) -> int:
    """How many groups may run next, by what the sampler counted. What it does not count changes nothing."""
    if pressure.get("preemptions", 0.0) > 0 or pressure.get("kv_use", 0.0) > kv_use:
        return running - max(1, running // 4)
    # A server that tells what it threw out and not what it holds: nothing was thrown out, so there may be room.
    unseen = 0.0 if "preemptions" in pressure else 1.0
    has_room = pressure.get("kv_use", unseen) < SPARE * kv_use
    is_waited_for = pressure.get("waiting", 0.0) >= 1.0
    return running + max(1, running // 8) if has_room and not is_waited_for else running


def next_lead(lead: int, num_queued: int, groups_per_step: int) -> int:
    """How many groups may be under way next, by how many were finished and not needed."""
    step = -(-groups_per_step // 4)
    if num_queued >= groups_per_step:
        return lead - step
    return lead + step if num_queued == 0 else lead
