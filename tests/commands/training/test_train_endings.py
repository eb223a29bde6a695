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
