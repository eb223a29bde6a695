"""How `temper train` leaves a run that did not reach its last step: with the reason and with what was rolled."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from temper import loop
from temper.commands.training.train import train
from temper.config import resolve, to_toml
from temper.errors import BackendError
from temper.runs.reader import RunReader
from temper.runs.report.report import make_report, render


@pytest.fixture
def recipe(tiny_recipe: dict[str, Any], tmp_path: Path) -> Path:
    made = copy.deepcopy(tiny_recipe)
    del made["heldout"]
    made["stage"] = [{**made["stage"][1], "steps": 3, "evaluation": {"every": 0}}]
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(resolve(made, [], where="test")))
    return path


def test_a_step_that_fails_leaves_its_transcripts_and_its_error(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_reward.py").write_text("def score(prompt, response, answer):\n    raise OSError('no disk')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    run = tmp_path / "run"
    with pytest.raises(BackendError, match="without filling one step"):
        train(recipe, overrides=["reward=[{kind='broken_reward:score'}]"], run=run)
    with RunReader(run) as reader:
        assert reader.state.name == "failed"
        assert "too few scored members" in reader.state.text
        assert [event.level for event in reader.events()][-1] == "error"
        rollouts = reader.trajectories(0, 1)
        assert len(rollouts) > 40 * 4
        assert all("no disk" in str(rollout.reason) for rollout in rollouts)
        assert all(len(rollout.rows) == 1 for rollout in rollouts), "with their tokens"
    text = render(make_report(run))
    assert "failed, 0 steps" in text
    assert "failed rollouts" in text


@pytest.fixture
def never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A reward that finds no answer right."""
    (tmp_path / "never_right.py").write_text("def score(prompt, response, answer):\n    return 0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return "reward=[{kind='never_right:score'}]"


@pytest.mark.parametrize("staleness", [0, 2])
def test_data_in_which_no_group_differs_ends_with_pass_rates_by_prompt_and_the_key_to_change(
    recipe: Path, tmp_path: Path, never: str, staleness: int
) -> None:
    rollout = (
        f"rollout={{groups_per_step=2, group_size=2, drop_degenerate=true, max_rounds=4, max_staleness={staleness}}}"
    )
    with pytest.raises(BackendError, match=r"all wrong, 0 all right\. Pass rates by prompt: 0% of 2 .*\[\[train\]\]"):
        train(recipe, overrides=[rollout, never], run=tmp_path / "run")
    with RunReader(tmp_path / "run") as reader:
        assert "Pass rates by prompt" in reader.state.text
        num_groups = len(reader.trajectories(0, 1)) // 2
        (warned,) = [event.text for event in reader.events() if "dropped so far" in event.text]
    assert 4 * 2 < num_groups <= 2 * 4 * 2 + 2 * (staleness + 1) * 2
    assert "Most prompts are too hard" in warned, "while it went on, and not in its last words alone"


def test_a_stage_that_trains_equal_groups_stops_when_none_ever_differed(
    recipe: Path, tmp_path: Path, never: str
) -> None:
    rollout = "rollout={groups_per_step=2, group_size=2, drop_degenerate=false}"
    alarm = "alarms={readiness='off', nothing_to_learn={patience=2}}"
    train(recipe, overrides=[rollout, never, alarm], run=tmp_path / "run")
    with RunReader(tmp_path / "run") as reader:
        assert [(found.rule, found.step) for found in reader.alarms()] == [("nothing_to_learn", 2)]
        assert reader.state.name == "stopped"
        assert "Pass rates by prompt: 0% of 2 " in reader.state.text
        assert len(reader.steps()) == 2


@pytest.mark.parametrize(
    ("error", "state", "told"),
    [(KeyboardInterrupt(), "stopped", "interrupted"), (ValueError("bad tensor"), "failed", "ValueError: bad tensor")],
)
def test_an_exception_in_the_loop_is_recorded_and_a_resume_forgets_it(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, state: str, told: str
) -> None:
    async def broken(plan: loop.Plan) -> None:
        raise error

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(loop, "run", broken)
        with pytest.raises(type(error)):
            train(recipe, run=run)
    with RunReader(run) as reader:
        assert (reader.state.name, reader.state.text) == (state, told)
    train(recipe, run=run, resume=True)
    with RunReader(run) as reader:
        assert reader.state.name == "finished"
