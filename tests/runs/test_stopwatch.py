"""Phases add up to the wall clock, whoever measured them."""

from __future__ import annotations

import pytest

from temper.runs import stopwatch
from temper.runs.stopwatch import Stopwatch


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock, as the only entry of a list."""
    time = [100.0]
    monkeypatch.setattr(stopwatch.time, "monotonic", lambda: time[0])
    return time


def test_laps_go_to_their_phases_and_the_rest_is_other(now: list[float]) -> None:
    clock = Stopwatch()
    now[0] += 1
    clock.lap("parity")
    now[0] += 2
    clock.skip()
    now[0] += 4
    clock.lap_as({"rollout": 3.0, "credit": 0.5})
    now[0] += 8
    clock.lap("train_other", inside={"forward_backward": 5.0})
    now[0] += 16
    clock.lap("parity")
    found = clock.report()
    assert found == {
        "parity": 17.0, "rollout": 3.0, "credit": 0.5, "forward_backward": 5.0, "train_other": 3.0, "other": 2.5,
    }  # fmt: skip
    assert sum(found.values()) == 31.0


def test_a_report_ends_at_the_last_lap_and_the_next_begins_there(now: list[float]) -> None:
    clock = Stopwatch()
    now[0] += 1
    clock.lap("canary")
    now[0] += 10
    assert clock.report() == {"canary": 1.0, "other": 0.0}
    clock.lap("record")
    assert clock.report() == {"record": 10.0, "other": 0.0}
