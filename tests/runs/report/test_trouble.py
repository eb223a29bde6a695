"""The report says what went wrong although the run went on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest

from temper.runs.records import AlarmRecord
from temper.runs.report.report import as_json, make_report, render
from temper.runs.store.run_store import RunStore
from temper.types import Batch, StepReport

StepMaker = Callable[..., tuple[StepReport, Batch]]


def alarm(step: int, rule: str = "truncation", level: str = "warn") -> AlarmRecord:
    return AlarmRecord(
        stage=0, step=step, time=5.0, rule=rule, level=level, value=0.5, text=f"{rule} seen at {step}",
        meaning="means", advice=f"mend {rule}",
    )  # fmt: skip


def steps(store: RunStore, make_step: StepMaker, *shares: float) -> None:
    store.begin_stage(0, "rl", len(shares))
    for step, share in enumerate(shares, start=1):
        report, batch = make_step(step)
        store.append(dataclasses.replace(report, metrics={**report.metrics, "data/degenerate": share}), batch)


def test_alarms_stand_in_the_report_the_gravest_first(store: RunStore, make_step: StepMaker) -> None:
    steps(store, make_step, 0.5, 0.5)
    for one in (alarm(1), alarm(2), alarm(2, "nan", "stop")):
        store.alarm(one)
    store.close()
    report = make_report(store.folder)
    text = render(report)
    assert "  warn             truncation, 2 times, last at rl step 2: truncation seen at 2\n" in text
    assert "  stop             nan, once, last at rl step 2: nan seen at 2\n                   Try: mend nan\n" in text
    assert text.index("nan, once") < text.index("truncation, 2 times")
    assert [one["rule"] for one in json.loads(as_json(report))["alarms"]] == ["truncation", "nan", "truncation"]


@pytest.mark.parametrize(("shares", "is_told"), [((1.0, 1.0, 1.0), True), ((1.0, 0.99, 1.0), False)])
def test_a_stage_without_any_signal_is_named(
    store: RunStore, make_step: StepMaker, shares: tuple[float, ...], is_told: bool
) -> None:
    steps(store, make_step, *shares)
    store.close()
    told = "rl: in none of 3 steps had a group two different rewards" in render(make_report(store.folder))
    assert told is is_told


def test_a_quiet_run_says_nothing_of_either(store: RunStore, make_step: StepMaker) -> None:
    store.begin_stage(0, "sft", 1)
    store.append(*make_step(1))
    store.close()
    text = render(make_report(store.folder))
    assert "no signal" not in text
    assert "Try:" not in text
