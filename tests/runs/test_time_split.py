"""The seconds of a step add up to its wall clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from temper import loop
from temper.build import build_stage, first_model, make_plan
from temper.config import resolve, to_toml
from temper.runs.metrics import describe
from temper.runs.reader import RunReader
from temper.runs.store.run_store import open_run
from temper.runs.time_split import PHASES, balanced, time_metrics
from temper.types import Batch, EvaluationResult, StepReport


class Clock:
    """A recorder that looks at its own clock."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def append(self, report: StepReport, batch: Batch) -> None:
        self.times.append(time.monotonic())

    def evaluation(self, result: EvaluationResult) -> None: ...


def imbalance(phases: Mapping[str, float], wall_seconds: float) -> float:
    """How far the phases are from the wall clock, as a share of it."""
    return abs(sum(phases.values()) - wall_seconds) / max(wall_seconds, 1e-9)


def test_phases_add_up_to_the_wall_clock_and_overlapping_ones_are_found_out() -> None:
    phases = {"rollout": 3.0, "forward_backward": 1.5}
    assert balanced(phases, 5.0) == {**phases, "other": 0.5}
    assert imbalance(balanced(phases, 5.0), 5.0) == 0.0
    # The planted fault: a phase inside another, counted twice.
    assert imbalance(balanced({**phases, "optimizer": 1.5}, 5.0), 5.0) == pytest.approx(0.2)


@pytest.mark.parametrize("kind", ["sft", "rl", "stale"])
def test_every_step_of_a_run_accounts_for_its_wall_clock(
    kind: str, tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    stage = tiny_recipe["stage"][kind != "sft"] | {"evaluation": {"every": 2}}
    if kind == "stale":
        stage |= {"rollout": {"groups_per_step": 2, "group_size": 4, "max_staleness": 2}}
    config = resolve({**tiny_recipe, "stage": [stage]}, [], where="test")[0]
    store, clock = open_run(tmp_path / "run", config=to_toml([config]), resume=False), Clock()

    async def go() -> None:
        live = build_stage(config, 0, first_model(config, tmp_path / "run"))
        await loop.run(
            make_plan(live, first_step=1, recorders=(clock, store), checkpoint=lambda step: time.sleep(0.02))
        )
        await live.close()

    asyncio.run(go())
    store.close()
    with RunReader(tmp_path / "run") as reader:
        walls = {point.step: point.value for point in reader.metric("sys/step_time")}
        phases: dict[int, dict[str, float]] = {}
        for row in reader.query("SELECT step, name, seconds FROM seconds"):
            phases.setdefault(row["step"], {})[row["name"]] = row["seconds"]
        unknown = [name for name in reader.metrics_at(0, 2) if describe(name) is None]
    assert unknown == []
    assert phases.keys() == walls.keys() == set(range(1, config.steps + 1))
    for step, wall in walls.items():
        assert wall is not None
        assert set(phases[step]) <= set(PHASES)
        assert min(phases[step].values()) >= 0
        assert imbalance(phases[step], wall) < 0.01
    assert phases[3]["evaluate"] > 0  # that after step 2
    assert phases[3]["checkpoint"] >= 0.02
    # By a clock that knows no phases: nothing between two reports is lost.
    total = sum(wall for step, wall in walls.items() if step > 1 and wall is not None)
    assert total == pytest.approx(clock.times[-1] - clock.times[0], rel=0.01)
    lost = total - sum(phases[step]["evaluate"] + phases[step]["checkpoint"] for step in walls if step > 1)
    assert lost != pytest.approx(clock.times[-1] - clock.times[0], rel=0.01)


def test_idle_shares_and_counters() -> None:
    phases = {"rollout": 6.0, "forward_backward": 1.0, "publish": 0.5, "other": 2.5}
    stats = {
        "decode_tokens": 4000.0,
        "decode_tok_s": 1000.0,
        "drawing_seconds": 4.0,
        "running": 5.0,
        "waiting": 2.5,
        "prefix_hit_rate": 0.75,
    }
    metrics = time_metrics(phases, stats)
    assert metrics["sys/step_time"] == 10.0
    assert metrics["sys/trainer_idle"] == 0.6
    assert metrics["sys/sampler_idle"] == 0.6  # 4 of 10 seconds with something to draw
    assert metrics["sys/publish_latency"] == 0.5
    assert metrics["sys/inflight"] == 7.5
    assert metrics["sys/prefix_hit_rate"] == 0.75
    assert metrics["sys/decode_tokens"] == 4000.0
    assert time_metrics({"data": 1.0}, {}) == {"sys/step_time": 1.0, "sys/trainer_idle": 1.0}
    assert all(describe(name) is not None for name in metrics)
