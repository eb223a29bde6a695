"""The benchmark of a long tail asks for one, has rows that a recipe may have, and reads what a run really did."""

from __future__ import annotations

import tomllib
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import pytest

from temper.build import check_stages
from temper.commands.training.train import train_stages
from temper.config import resolve
from temper.runs.reader import RunReader


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import long_tail_runs

    return long_tail_runs


def test_a_tenth_of_the_prompts_asks_for_answers_eight_times_as_long(runs: ModuleType) -> None:
    tasks = [runs.go_through(index, 1) for index in range(2000)]
    lengths = [len(task.answer) for task in tasks]
    assert all(task.answer[-1] == task.messages[0].content for task in tasks)
    long = [length for length in lengths if length > 50]
    assert 0.08 < len(long) / len(lengths) < 0.12
    assert fmean(long) / fmean(length for length in lengths if length <= 50) == pytest.approx(8, abs=0.2)


def test_every_row_is_a_recipe_that_trains(runs: ModuleType) -> None:
    recipe = tomllib.loads(runs.RECIPE + runs.PRACTICE.format(model="checkpoint"))
    for number in range(len(runs.SETTINGS)):
        stages = resolve(recipe, runs.changes_of(number, steps=8), where="benchmark")
        check_stages(stages)
        assert stages[0].rollout.max_staleness == runs.SETTINGS[number][0]
        assert stages[0].optim.learning_rate == 0.0, "or lengths would change"


def test_a_run_that_cuts_nobody_draws_what_it_trains(
    runs: ModuleType, tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    table = {**tiny_recipe, "stage": [{**tiny_recipe["stage"][1], "rollout": {"groups_per_step": 8, "group_size": 4}}]}
    del table["heldout"], table["stage"][0]["evaluation"]
    folder = train_stages(resolve(table, (), where="tiny"), run=tmp_path / "run")
    found = runs.measure(folder)
    with RunReader(folder) as run:
        lengths = [row["num_tokens"] for row in run.query("SELECT num_tokens FROM trajectories")]
    assert found.length == fmean(lengths)
    assert len(found.lengths) == 8 - runs.SKIPPED
    assert found.drawn_per_trained == pytest.approx(1.0, abs=0.2), "canaries draw a few tokens of their own"
    assert 0 < found.trainer_idle < 1
    assert 0 <= found.sampler_idle < 1
    assert found.age == 0
