"""Alarms inside `temper train`: told, stored, able to pause and stop, and at peace with a resume."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from temper.commands.training.train import train
from temper.config import resolve, to_toml
from temper.errors import UserError
from temper.runs.reader import RunReader


def write(folder: Path, recipe: dict[str, Any], **alarms: Any) -> Path:
    recipe = copy.deepcopy(recipe)
    # Without imitation the model ends no answer: truncation is certain, and raised at step 5.
    recipe["stage"] = [{**recipe["stage"][1], "steps": 7, "sampling": {"max_new_tokens": 1}}]
    path = folder / "recipe.toml"
    path.write_text(to_toml(resolve({**recipe, "alarms": alarms}, [], where="test")))
    return path


def alarms_of(run: Path) -> list[tuple[str, int, str]]:
    with RunReader(run) as reader:
        return [(alarm.rule, alarm.step, alarm.level) for alarm in reader.alarms()]


def state_of(run: Path) -> tuple[bool, int]:
    with RunReader(run) as reader:
        return reader.is_finished, len(reader.steps())


def test_a_warning_is_stored_and_training_goes_on(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    run = train(write(tmp_path, tiny_recipe), run=tmp_path / "run")
    assert alarms_of(run) == [("truncation", 5, "warn")]
    assert state_of(run) == (True, 7)


def test_a_stop_leaves_a_checkpoint_from_which_the_same_run_goes_on(
    tiny_recipe: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = train(write(tmp_path, tiny_recipe), run=tmp_path / "alone")
    recipe = write(tmp_path, tiny_recipe, truncation="stop")
    run = train(recipe, run=tmp_path / "run")
    assert state_of(run) == (False, 5)
    assert (run / "checkpoints" / "0-rl" / "step-5").is_dir()
    assert "stopped after step 5" in capsys.readouterr().out
    train(recipe, run=run, resume=True)
    assert state_of(run) == (True, 7)
    assert alarms_of(run) == [("truncation", 5, "stop")], "raised once, not again by the resume"
    with RunReader(run) as resumed, RunReader(alone) as whole:
        assert resumed.fingerprint()["metrics"] == whole.fingerprint()["metrics"]


def test_a_pause_without_an_answer_stops_with_a_checkpoint(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe = write(tmp_path, tiny_recipe, truncation={"level": "pause", "pause_hours": 0})
    run = train(recipe, run=tmp_path / "run")
    assert state_of(run) == (False, 5)
    assert (run / "checkpoints" / "0-rl" / "step-5").is_dir()
    with RunReader(run) as reader:
        assert any("nobody ended the pause" in event.text for event in reader.events())


def test_a_misspelt_rule_is_refused_before_anything_is_made(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match='Did you mean "truncation"'):
        train(write(tmp_path, tiny_recipe, truncaton="stop"), run=tmp_path / "run")
    assert not (tmp_path / "run").exists()
