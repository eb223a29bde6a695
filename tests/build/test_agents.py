"""Which stages an agent may play in, and what a recipe must say of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from temper.build import check_stages
from temper.config import load_recipe, to_toml
from temper.errors import UserError

ROOT = Path(__file__).parents[2]


def recipe(tmp_path: Path, *overrides: str) -> list[Any]:
    (tmp_path / "mine.py").write_text("def solve(task):\n    return ''\n")
    text = (ROOT / "recipes" / "agent_http.toml").read_text().replace("examples/agents/plain_http.py", "mine.py")
    (tmp_path / "recipe.toml").write_text(text)
    return load_recipe(tmp_path / "recipe.toml", overrides)


def test_a_function_beside_the_recipe_is_found(tmp_path: Path) -> None:
    stages = recipe(tmp_path)
    check_stages(stages)
    assert f"{tmp_path}/mine.py:solve" in to_toml(stages)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.max_turns=1", "rollout.max_turns is the number of calls"),
        ("stage.2.objective.advantage=step_values", "an agent that leads its own cannot be taken back"),
        ("stage.2.kind=rejection", "cannot play in a stage of kind rejection"),
        ("env.options.function=other.py:solve", "other.py is not there"),
        ("env.options.comand=x", 'option "comand" is unknown'),
    ],
)
def test_what_an_agent_cannot_do_is_said_before_anything_is_read(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_stages(recipe(tmp_path, override))
