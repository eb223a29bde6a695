"""A sweep trains every setting once, goes on where it stopped, and says what its intervals allow to be said."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from temper.commands.training import sweep
from temper.commands.training.sweep import SweepPoint, is_done, run_sweep, split_values, sweep_points
from temper.config import resolve, to_toml
from temper.errors import UserError
from temper.runs.reader import RunReader
from temper.runs.report.sweep_table import SweepRow, header, order_rows, render_page, tie_line, tied_with_best
from temper.types import EvaluationResult


@pytest.fixture
def recipe(tiny_recipe: dict[str, Any], tmp_path: Path) -> Path:
    tiny_recipe["stage"] = [{**tiny_recipe["stage"][0], "steps": 2}]
    path = tmp_path / "r.toml"
    path.write_text(to_toml(resolve(tiny_recipe, [], where="tiny")))
    return path


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a.b=1", ["1"]),
        ("a.b=1e-4, 3e-4", ["1e-4", "3e-4"]),
        ("a.b=grpo,dapo", ["grpo", "dapo"]),
        ('a.b=["x","y"],[]', ['["x","y"]', "[]"]),
        ('a.b={name="clip", high=0.3},"a,b"', ['{name="clip", high=0.3}', '"a,b"']),
    ],
)
def test_commas_separate_values_but_not_inside_tables_lists_and_texts(text: str, values: list[str]) -> None:
    assert split_values(text) == ("a.b", values)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["steps=2"], "needs a key with several values"),
        (["steps=2,"], "empty or a repeated value"),
        (["steps=2,2"], "empty or a repeated value"),
        (["steps"], "not of the form"),
        (["steps=2,3", "steps=4,5"], "given twice"),
        (["steps=2,3", "optim.lr=1"], "optim.learning_rate"),
        (["steps=" + ",".join(map(str, range(1, 1200)))], "--random 1000"),
    ],
)
def test_what_is_no_sweep_is_refused_before_anything_runs(changes: list[str], said: str, recipe: Path) -> None:
    with pytest.raises(UserError, match=said):
        sweep_points(recipe, changes, recipe.parent / "out")
    assert not (recipe.parent / "out").exists()


def test_a_grid_has_every_combination_and_a_folder_for_each(recipe: Path, tmp_path: Path) -> None:
    points = sweep_points(recipe, ["steps=2,3", "seed=7", "optim.learning_rate=1e-3,1e-2"], tmp_path / "out")
    assert [point.values for point in points] == [
        {"steps": steps, "optim.learning_rate": rate} for steps in ("2", "3") for rate in ("1e-3", "1e-2")
    ]
    assert all("seed=7" in point.overrides for point in points)
    assert len({point.folder for point in points}) == 4
    assert points[0].folder.name.startswith("steps=2,learning_rate=1e-3-")


def test_a_changed_recipe_is_another_run(recipe: Path, tmp_path: Path) -> None:
    before = sweep_points(recipe, ["steps=2,3"], tmp_path)
    assert before == sweep_points(recipe, ["steps=2,3"], tmp_path)
    recipe.write_text(recipe.read_text().replace("learning_rate = 0.003", "learning_rate = 0.004"))
    after = sweep_points(recipe, ["steps=2,3"], tmp_path)
    assert {point.folder for point in before}.isdisjoint(point.folder for point in after)


def test_a_random_choice_has_no_run_twice_and_grows_by_more(recipe: Path, tmp_path: Path) -> None:
    changes = ["steps=1,2,3,4", "seed=1,2,3,4"]
    few = sweep_points(recipe, changes, tmp_path, num_random=5)
    more = sweep_points(recipe, changes, tmp_path, num_random=9)
    assert len({point.folder for point in more}) == 9
    assert more[:5] == few
    assert sweep_points(recipe, changes, tmp_path, num_random=5, seed=1) != few
    assert len(sweep_points(recipe, changes, tmp_path, num_random=99)) == 16


def test_so_many_run_at_once_and_a_failure_stops_nobody(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = sweep_points(recipe, ["seed=1,2,3,4"], tmp_path)
    started: list[SweepPoint] = []
    processes: list[subprocess.Popen[bytes]] = []
    most = 0

    def start(_: Path, point: SweepPoint, parallel: int) -> subprocess.Popen[bytes]:
        nonlocal most
        code = 3 if point is points[1] else 0
        processes.append(subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(0.3); exit({code})"]))
        most = max(most, sum(process.poll() is None for process in processes))
        started.append(point)
        return processes[-1]

    monkeypatch.setattr(sweep, "_start", start)
    monkeypatch.setattr(sweep, "is_done", lambda point: point is points[2])
    said: list[str] = []
    run_sweep(recipe, points, parallel=2, note=said.append)
    assert started == [points[0], points[1], points[3]]
    assert most == 2
    assert said[0] == "1 of 4 runs are finished already"
    assert any("exit code 3" in line and "seed=2" in line for line in said)


def test_an_interrupted_sweep_leaves_no_process(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes: list[subprocess.Popen[bytes]] = []

    def start(*_: object) -> subprocess.Popen[bytes]:
        processes.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        return processes[-1]

    first, sleep = iter([True]), time.sleep

    def interrupt(seconds: float) -> None:
        if next(first, False):
            raise KeyboardInterrupt
        sleep(seconds)

    monkeypatch.setattr(sweep, "_start", start)
    monkeypatch.setattr(sweep.time, "sleep", interrupt)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_sweep(recipe, sweep_points(recipe, ["seed=1,2"], tmp_path), parallel=2, note=lambda line: None)
    assert [process.poll() is not None for process in processes] == [True, True]
    assert time.monotonic() - begun < 30


def row(name: str, score: float, width: float, **more: Any) -> SweepRow:
    result = EvaluationResult(
        stage=0, step=4, name="greedy", score=score, low=score - width, high=score + width, num_prompts=8,
        samples_per_prompt=1, constant_score=0.0, budget={},
    )  # fmt: skip
    made = SweepRow(
        values={"optim.learning_rate": name}, folder=f"runs/{name}", state="finished", why="", num_steps=4,
        seconds=1.0, evaluations=(replace(result, step=0), result), offsets=(0,),
    )  # fmt: skip
    return replace(made, **more)


def test_the_best_comes_first_and_what_overlaps_with_it_is_not_called_worse() -> None:
    rows = [row("low", 0.2, 0.05), row("near", 0.55, 0.1), row("best", 0.6, 0.1), row("none", 0.0, 0.0, evaluations=())]
    assert [one.values["optim.learning_rate"] for one in order_rows(rows)] == ["best", "near", "low", "none"]
    assert [one.values["optim.learning_rate"] for one in tied_with_best(rows)] == ["best", "near"]
    assert tie_line(rows).startswith("2 of 3 runs have intervals that overlap")
    assert "better than the other 1" in tie_line([row("low", 0.2, 0.05), row("best", 0.6, 0.1)])
    assert "nothing can be compared" in tie_line(rows[:1])
    assert header(rows)[:2] == ["learning_rate", "held out, greedy"]


def test_the_page_needs_nothing_else_and_escapes_what_recipes_say() -> None:
    page = render_page("<b>", [row("<script>", 0.2, 0.05), row("b", 0.6, 0.1)])
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "<svg" in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")


@pytest.mark.heavy
def test_a_sweep_trains_all_and_a_second_one_trains_nothing(recipe: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "temper", "sweep", str(recipe), "--set", "optim.learning_rate=1e-3,1e-2"]
    command += ["--out", str(tmp_path / "out"), "--json"]
    root = Path(__file__).parents[3]

    def go() -> list[dict[str, Any]]:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=240, cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    rows = go()
    assert [one["state"] for one in rows] == ["finished", "finished"]
    assert (tmp_path / "out" / "sweep.html").read_text().count("<tr") == 3
    points = sweep_points(recipe, ["optim.learning_rate=1e-3,1e-2"], tmp_path / "out")
    assert all(is_done(point) for point in points)
    written = [(point.folder / "run.db").stat().st_mtime_ns for point in points]
    assert go() == rows
    assert [(point.folder / "run.db").stat().st_mtime_ns for point in points] == written
    with RunReader(points[0].folder) as reader:
        assert len(reader.steps()) == 2
