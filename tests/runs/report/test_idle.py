"""Idle time of a stage is that of its steps, each by its length."""

from __future__ import annotations

from collections.abc import Callable

from temper.runs.report.report import make_report, render
from temper.runs.store.run_store import RunStore
from temper.types import Batch, StepReport

StepMaker = Callable[..., tuple[StepReport, Batch]]


def test_a_long_step_counts_for_more(store: RunStore, make_step: StepMaker) -> None:
    store.begin_stage(0, "rl", 2)
    for step, wall, trainer, sampler in ((1, 30.0, 0.8, 0.0), (2, 10.0, 0.4, 1.0)):
        shares = {"sys/trainer_idle": trainer, "sys/sampler_idle": sampler}
        store.append(*make_step(step, 0, **{"sys/step_time": wall}, **shares))
    store.close()
    report = make_report(store.folder)
    assert report.stages[0].idle == {"trainer": 0.7, "sampler": 0.25}
    assert "  idle             rl: trainer 70%, sampler 25%\n" in render(report)


def test_a_run_that_did_not_measure_it_says_nothing(store: RunStore, make_step: StepMaker) -> None:
    store.begin_stage(0, "rl", 1)
    store.append(*make_step(1, 0))
    store.close()
    report = make_report(store.folder)
    assert report.stages[0].idle == {}
    assert "idle" not in render(report)
