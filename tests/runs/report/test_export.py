"""Exported metrics are those of the store, number by number, in both forms and both formats."""

from __future__ import annotations

import csv
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from temper.errors import UserError, install_line
from temper.runs.reader import RunReader
from temper.runs.report.export import Form, export_metrics
from temper.runs.store.run_store import RunStore
from temper.types import Batch, EvaluationResult, StepReport

Values = dict[tuple[int, int, str], float | None]


@pytest.fixture
def run(
    store: RunStore,
    make_step: Callable[..., tuple[StepReport, Batch]],
    make_evaluation: Callable[..., EvaluationResult],
) -> Path:
    store.evaluation(make_evaluation(0, 0.1))
    for step in (1, 2, 3):
        more = {"policy/odd": 0.1 + step} if step == 2 else {"policy/lost": math.nan}
        store.append(*make_step(step, **more))
    store.append(*make_step(1, stage=1))
    store.evaluation(make_evaluation(3, 1 / 3))
    store.close()
    return store.folder


def stored(run: Path) -> Values:
    with RunReader(run) as reader:
        values: Values = {}
        for step in reader.steps():
            found = reader.metrics_at(step.stage, step.step) | {"loss/total": step.loss}
            values |= {(step.stage, step.step, name): value for name, value in found.items()}
        for row in reader.query("SELECT * FROM seconds"):
            values[row["stage"], row["step"], f"seconds/{row['name']}"] = row["seconds"]
        for result in reader.evaluations():
            bounds = {"": result.score, "/low": result.low, "/high": result.high}
            values |= {(result.stage, result.step, f"heldout/{result.name}{end}"): x for end, x in bounds.items()}
    return values


def read(path: Path, form: Form) -> Values:
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    else:
        parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
        rows = parquet.read_table(path).to_pylist()
    values: Values = {}
    for row in rows:
        key = int(row.pop("stage")), int(row.pop("step"))
        cells = {row["name"]: row["value"]} if form == "long" else row
        numbers = {name: None if x in ("", None) else float(x) for name, x in cells.items()}
        values |= {(*key, name): x for name, x in numbers.items() if form == "long" or x is not None}
    return values


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize("form", ["long", "wide"])
def test_every_number_comes_back_to_the_last_digit(run: Path, tmp_path: Path, ending: str, form: Form) -> None:
    if ending == "parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    target = tmp_path / f"metrics.{ending}"
    count = export_metrics(run, target, form=form)
    expected = stored(run)
    assert (0, 3, "heldout/greedy") in expected
    if form == "wide":  # an empty cell says no more than that there is no number
        expected = {key: value for key, value in expected.items() if value is not None}
    else:
        assert expected[0, 1, "policy/lost"] is None
        assert count == len(expected)
    assert read(target, form) == expected
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_wide_table_has_one_row_per_step_and_an_evaluation_before_the_first(run: Path, tmp_path: Path) -> None:
    assert export_metrics(run, tmp_path / "wide.csv", form="wide") == 5
    lines = (tmp_path / "wide.csv").read_text().splitlines()
    assert lines[0].split(",")[:3] == ["stage", "step", "heldout/greedy"]
    assert [line.split(",")[:2] for line in lines[1:]] == [["0", "0"], ["0", "1"], ["0", "2"], ["0", "3"], ["1", "1"]]


def test_other_endings_and_places_are_refused_before_anything_is_written(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"neither a \.csv nor a \.parquet"):
        export_metrics(run, tmp_path / "metrics.xlsx")
    with pytest.raises(UserError, match="not a directory"):
        export_metrics(run, tmp_path / "nowhere" / "metrics.csv")
    with pytest.raises(UserError, match="not a run directory"):
        export_metrics(tmp_path, tmp_path / "metrics.csv")
    assert not (tmp_path / "metrics.csv").exists()


def test_parquet_without_pyarrow_names_the_install_line(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=re.escape(install_line("parquet"))):
        export_metrics(run, tmp_path / "metrics.parquet")
    assert not (tmp_path / "metrics.parquet").exists()
