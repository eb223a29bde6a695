"""The concurrency controller: fewer groups run when the cache is full, fewer run ahead when finished ones queue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from temper.rollout.controls.concurrency import Concurrency, next_lead, next_running
from temper.rollout.controls.control import Setting
from temper.rollout.controls.pressure import Pressure
from temper.simulate.clock import run_virtual
from temper.types import Publication
from tests.fakes.rolling import Flow, Run, train
from tests.fakes.tail import TailSampler, heavy_tail


class CrowdedSampler(TailSampler):
    """Has a cache for so many requests. One that finds it full is preempted on its way and takes four times as long."""

    def __init__(self, capacity: int) -> None:
        super().__init__(heavy_tail(0.0))
        self._capacity, self._peak, self._preemptions = capacity, 0, 0
        self._pressure = Pressure(self.stats)
        self.pressure = self._pressure.latest
        self.preemptions: list[float] = []

    def seconds_of(self, count: int) -> float:
        running = len(self._running) + 1
        self._peak = max(self._peak, running)
        self._preemptions += running > self._capacity
        return 4.0 * count if running > self._capacity else float(count)

    def stats(self) -> Mapping[str, float]:
        counted = {"kv_use": min(1.0, self._peak / self._capacity), "preemptions": float(self._preemptions)}
        self._peak = self._preemptions = 0
        return {**counted, "waiting": 0.0}

    async def load(self, publication: Publication) -> None:
        await super().load(publication)
        self.preemptions.append(self._pressure.read()["preemptions"])


def run(capacity: int, controls: list[Any], train_seconds: float = 1.0, steps: int = 24) -> tuple[Run, CrowdedSampler]:
    sampler = CrowdedSampler(capacity)

    async def work() -> Run:
        flow = Flow(staleness=4, order="draw", controls=controls, pressure=sampler.pressure)
        return await train(flow.open(sampler), sampler, range(1, steps + 1), train_seconds)

    return run_virtual(work()), sampler


def test_a_full_cache_lowers_the_limit_until_nobody_is_thrown_out_and_time_is_saved() -> None:
    """Twenty groups of two may run by the bound, and the cache has room for sixteen requests."""
    free, thrashing = run(16, [])
    steered, calm = run(16, ["concurrency"])
    assert sum(thrashing.preemptions[8:]) > 40
    assert sum(calm.preemptions[8:]) < 0.35 * sum(thrashing.preemptions[8:])
    assert steered.seconds < 0.75 * free.seconds
    limits = [batch.system["flow/running_limit"] for batch in steered.batches]
    assert limits[0] == 20, "before the first step nothing is known"
    assert all(5 <= limit <= 11 for limit in limits[8:])
    assert min(batch.system["flow/running_limit_change"] for batch in steered.batches) < 0


def test_a_cache_with_room_leaves_the_limit_where_the_bound_is() -> None:
    steered, _ = run(1000, ["concurrency"], steps=6)
    assert {batch.system["flow/running_limit"] for batch in steered.batches} == {20}


def test_when_the_trainer_is_slow_fewer_run_ahead_and_tokens_are_younger() -> None:
    free, _ = run(1000, [], train_seconds=40.0)
    steered, _ = run(1000, ["concurrency"], train_seconds=40.0)
    ages = [sum(one.ages[len(one.ages) // 2 :]) / len(one.ages[len(one.ages) // 2 :]) for one in (free, steered)]
    assert ages[0] == 4.0
    assert ages[1] < 0.6 * ages[0]
    assert steered.seconds == free.seconds, "the trainer never waits for it"
    assert [batch.system["flow/lead_limit"] for batch in steered.batches[:4]] == [19, 18, 17, 16]


@pytest.mark.parametrize(
    ("running", "pressure", "then"),
    [
        (20, {}, 20),
        (20, {"preemptions": 3.0, "kv_use": 0.5}, 15),
        (20, {"preemptions": 0.0, "kv_use": 0.96}, 15),
        (20, {"kv_use": 0.9}, 20),
        (20, {"kv_use": 0.5, "waiting": 4.0}, 20),
        (20, {"kv_use": 0.5, "waiting": 0.0}, 22),
        (3, {"kv_use": 0.5}, 4),
        (1, {"preemptions": 1.0}, 0),
        (16, {"preemptions": 0.0}, 18),
        (16, {"preemptions": 2.0}, 12),
    ],
)
def test_running_groups_follow_the_worked_numbers(running: int, pressure: dict[str, float], then: int) -> None:
    assert next_running(running, pressure, kv_use=0.95) == then


@pytest.mark.parametrize(("num_queued", "then"), [(0, 12), (3, 10), (8, 8), (30, 8)])
def test_the_lead_follows_the_worked_numbers(num_queued: int, then: int) -> None:
    assert next_lead(10, num_queued, groups_per_step=8) == then


def make(**options: Any) -> Concurrency:
    return Concurrency(Setting(groups_per_step=4, max_staleness=2, order="draw", **options))


def test_limits_are_remembered_and_bounded() -> None:
    first, again = make(), make()
    first._running, first._lead = 5, 7
    again.load_state(first.state())
    assert (again.most_running(), again.lead()) == (5, 7)
    again.load_state({"running": 100, "lead": 100})
    assert (again.most_running(), again.lead()) == (12, 12), "what the recipe allows now"
    again.load_state({"running": 0, "lead": 0})
    assert (again.most_running(), again.lead()) == (1, 4), "a step can always be filled"


def test_two_readers_see_the_same_counts() -> None:
    pressure = Pressure(iter([{"kv_use": 0.5}, {"kv_use": 0.7}]).__next__)
    assert pressure.latest() == {}
    assert pressure.read() == pressure.latest() == pressure.latest() == {"kv_use": 0.5}
