"""`temper env check`: the verdicts of a recipe, and the exit code that a script goes by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from temper.cli import app
from temper.commands.judging.environment import check_recipe
from temper.config import resolve, to_toml
from temper.errors import UserError
from temper.models.tiny import make_tiny_model

LITTER = """
import itertools
from pathlib import Path
from temper.envs.single_turn import SingleTurn

NAMES = itertools.count()

class Litter(SingleTurn):
    async def close(self):
        Path(__file__).with_name(f"left-{next(NAMES)}").write_text("x")
"""


def write(recipe: dict[str, Any], folder: Path) -> Path:
    path = folder / "recipe.toml"
    path.write_text(to_toml(resolve(recipe, [], where="recipe")))
    return path


@pytest.fixture
def recipe(tiny_recipe: dict[str, Any]) -> dict[str, Any]:
    return {**tiny_recipe, "stage": [{"kind": "rl"}]}


def test_a_good_recipe_ends_with_0_and_a_bad_environment_with_1(recipe: dict[str, Any], tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["env", "check", str(write(recipe, tmp_path)), "--tasks", "4"])
    assert ran.exit_code == 0, ran.output
    assert "WRONG" not in ran.output
    (tmp_path / "litter.py").write_text(LITTER)
    bad = {**recipe, "env": {"name": f"{tmp_path / 'litter.py'}:Litter"}}
    ran = CliRunner().invoke(app, ["env", "check", str(write(bad, tmp_path)), "--tasks", "4"])
    assert ran.exit_code == 1
    assert "WRONG" in ran.output


def test_a_policy_says_which_tasks_it_could_learn(recipe: dict[str, Any], tmp_path: Path) -> None:
    model = make_tiny_model(
        tmp_path / "model", layers=2, width=32, heads=2, kv_heads=1, mlp_width=64, context=32, seed=0,
        alphabet="abcdefghijklmnopqrstuvwxyz",
    )  # fmt: skip
    found = check_recipe(write(recipe, tmp_path), num_tasks=4, checkpoint=model, draws=4)
    assert found[-1].name == "learnable"
    assert "of 4 tasks" in found[-1].said


@pytest.mark.parametrize("has_policy", [False, True])
@pytest.mark.parametrize("judge", ["policy", "folder"])
def test_a_judge_that_only_a_run_answers_is_refused_before_anything_is_made(
    recipe: dict[str, Any], tmp_path: Path, judge: str, has_policy: bool
) -> None:
    (tmp_path / "folder").mkdir()
    judge = judge if judge == "policy" else str(tmp_path / judge)
    path = write({**recipe, "env": {"name": "verifiers", "options": {"judge": judge}}}, tmp_path)
    with pytest.raises(UserError, match=r"temper train.*none to ask.*judge=http"):
        check_recipe(path, checkpoint=tmp_path / "nothing" if has_policy else None)
    address = ["env.options.judge=http://127.0.0.1:9/v1", "env.options.judge_model=m"]
    with pytest.raises(UserError, match="nothing"):
        check_recipe(path, checkpoint=tmp_path / "nothing", overrides=address)


def test_an_agent_is_refused_and_the_command_named_that_tries_it(recipe: dict[str, Any], tmp_path: Path) -> None:
    agent = {"env": {"name": "agent", "options": {"command": "python"}}, "rollout": {"max_turns": 2}}
    path = write({**recipe, **agent}, tmp_path)
    with pytest.raises(UserError, match=rf"no environment.* temper train {path} --dry-run plays one episode"):
        check_recipe(path)


def test_a_recipe_that_plays_nothing_is_refused(recipe: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no stage plays in an environment"):
        check_recipe(write({**recipe, "stage": [{"kind": "sft"}]}, tmp_path))
