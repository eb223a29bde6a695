"""The benchmark of slow environments plays real episodes to their end, whatever they wait in."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["async", "threads", "busy"])
def test_all_episodes_end_and_the_engine_has_work(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    import episodes

    found = asyncio.run(episodes.measure(kind, 24, 0.02, 0.1, turns=2))
    assert found.num_completed == 24
    assert found.seconds >= found.shortest * 0.9, "nobody is faster than alone"
    assert found.busy_share > 0
    assert found.running_mean > 1
    assert found.lag(0.5) <= found.lag(0.99) <= found.lag(1.0)
