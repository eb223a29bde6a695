"""Reading a run while it is written."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from temper.errors import UserError
from temper.runs.reader import RunReader
from temper.runs.store.run_store import RunStore
from temper.types import Batch, EvaluationResult, StepReport

StepMaker = Callable[..., tuple[StepReport, Batch]]


def test_an_open_reader_sees_new_steps_and_never_half_of_one(store: RunStore, make_step: StepMaker) -> None:
    with RunReader(store.folder) as reader:
        for step in range(1, 30):
            store.append(*make_step(step))
            for seen in reader.steps():
                assert len(reader.trajectories(seen.stage, seen.step)) == 4
        store.flush(30.0)
        assert [point.value for point in reader.metric("reward/mean")] == [step / 10 for step in range(1, 30)]
    store.close()


def test_a_reader_cannot_write(store: RunStore) -> None:
    with RunReader(store.folder) as reader, pytest.raises(Exception, match="readonly"):
        reader.query("DELETE FROM meta")
    store.close()


def test_evaluations_stages_seconds_and_failures_come_back(
    store: RunStore, make_step: StepMaker, make_evaluation: Callable[..., EvaluationResult]
) -> None:
    store.begin_stage(0, "rl", 5)
    store.begin_stage(0, "rl", 7)
    for step in (1, 2):
        store.append(*make_step(step))
    details = {"pass@2": {"score": 0.5, "low": -math.inf, "high": 0.625}, "proxy_gap": 1 / 3}
    result = dataclasses.replace(make_evaluation(2, 0.5), details=details)
    store.evaluation(make_evaluation(2, 0.1))
    store.evaluation(result)
    store.close()
    with RunReader(store.folder) as reader:
        assert reader.evaluations() == [result]
        assert [(stage.name, stage.steps) for stage in reader.stages()] == [("rl", 7)]
        assert reader.seconds() == {(0, "rollout"): 6.0, (0, "train"): 2.0}
        assert reader.failures() == {"error: verifier timed out": 2}
        (tasks,) = reader.failing_tasks().values()
        assert tasks == tuple(sorted({entry.task_id for entry in reader.ledger() if entry.draw in (3, 5)})), tasks
        assert [entry.draw for entry in reader.ledger()] == [2, 3, 4, 5]


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"it has no run\.db"):
        RunReader(tmp_path)
