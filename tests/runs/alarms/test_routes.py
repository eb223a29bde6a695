"""Alarms about mixtures of experts ring when routers crowd, collapse or wander, and not before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from temper.runs.alarms.alarms import Alarms
from temper.runs.alarms.rules import configure
from temper.runs.records import AlarmRecord
from temper.types import Batch
from tests.runs.alarms.test_alarms import report


def heard(folder: Path, metric: str, values: Sequence[float]) -> list[AlarmRecord]:
    found: list[AlarmRecord] = []
    alarms = Alarms(configure({}, is_moe=True), folder, found.append, lambda text: None)
    for step, value in enumerate(values, start=1):
        alarms.append(report(step, **{metric.replace("/", "__"): value}), Batch(updates=()))
    return found


@pytest.mark.parametrize(
    ("rule", "metric", "usual", "wrong", "said"),
    [
        ("expert_collapse", "route/load_max", 1.6, 3.0, "do 3 times the mean work, 1.6 times at first"),
        ("router_collapse", "route/entropy", 2.0, 0.9, "entropy fell from 2 to 0.9 nats"),
        ("routes_moved", "route/moved_frac", 0.03, 0.3, "would not choose 30% of the experts"),
        ("router_shift", "route/shift", 0.05, 0.3, "moved by 0.3 nats"),
    ],
)
def test_routers_that_go_wrong_ring_by_name(
    rule: str, metric: str, usual: float, wrong: float, said: str, tmp_path: Path
) -> None:
    found = heard(tmp_path, metric, [usual] * 40 + [wrong] * 10)
    assert [alarm.rule for alarm in found] == [rule]
    assert said in found[0].text
    assert found[0].step > 40


@pytest.mark.parametrize(
    ("metric", "values"),
    [
        ("route/load_max", [1.6, 1.8] * 30),
        ("route/load_max", [3.0] * 60),  # as crowded as the checkpoint came
        ("route/entropy", [2.0 - 0.01 * step for step in range(60)]),
        ("route/entropy", [0.3] * 60),  # as sure as the checkpoint came
        ("route/moved_frac", [0.0, 0.03, 0.031] * 20),  # the largest that was seen in bfloat16: docs/experts.md
        ("route/moved_frac", [0.01] * 30 + [0.9] + [0.01] * 30),  # one odd step
        ("route/shift", [0.02, 0.2] * 30),
    ],
)
def test_routers_that_are_as_ever_ring_nothing(metric: str, values: list[float], tmp_path: Path) -> None:
    assert heard(tmp_path, metric, values) == []
