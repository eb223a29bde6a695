"""The benchmark of slow environments plays real episodes to their end, wherever they wait; the loop stays awake."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
LATE_SECONDS = 0.15
"""Ten times what the loop is late on two cores that twenty others want as well."""


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["async", "threads", "processes", "burn-threads", "burn-processes"])
def test_all_episodes_end_and_the_engine_has_work(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    import episodes

    found = asyncio.run(episodes.measure(kind, 24, 0.02, 0.1, turns=2))
    assert found.num_completed == 24
    assert found.seconds >= found.shortest * 0.9, "nobody is faster than alone"
    assert found.busy_share > 0
    assert found.running_mean > 1 or kind.startswith("burn"), "they compute one after the other"
    assert found.lag(0.5) <= found.lag(0.99) <= found.lag(1.0)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["async", "threads", "burn-processes"])
def test_hundreds_of_episodes_leave_the_loop_awake(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    import episodes

    found = asyncio.run(episodes.measure(kind, 16 if kind == "burn-processes" else 256, 0.1, 1.0, turns=2))
    assert found.lag(0.9) < LATE_SECONDS


@pytest.mark.heavy
def test_blocking_work_on_the_loop_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def block() -> None:
        time.sleep(0.2)

    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr("temper.rollout.episode.take_turn", block)
    import episodes

    assert asyncio.run(episodes.measure("async", 16, 0.1, 1.0, turns=2)).lag(0.9) > LATE_SECONDS
