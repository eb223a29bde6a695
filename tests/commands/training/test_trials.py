"""A dry run tries the reward on rows of the training files and of the held-out ones, and says which it means."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from temper.commands.training.preflight import count_doubts, dry_run
from temper.config import resolve, to_toml
from temper.errors import UserError

REWARD = """
def said(prompt, response, answer, times):
    return float(bool(answer) and answer in response) / int(times)
"""
Make = Callable[..., Path]


@pytest.fixture
def make_recipe(tiny_recipe: dict[str, Any], tmp_path: Path) -> Make:
    """RL on forty rows, of which some are changed, beside three sound held-out ones."""
    (tmp_path / "own.py").write_text(REWARD)

    def write(name: str, rows: list[dict[str, Any]]) -> str:
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
        return str(tmp_path / name)

    def make(places: range = range(40), **change: Any) -> Path:
        rows = [{"prompt": chr(97 + place % 26) * (place // 26 + 1), "answer": "ab", "times": 1} for place in range(40)]
        changed = [{**row, **change} if place in places else row for place, row in enumerate(rows)]
        tiny_recipe["train"] = [{"path": write("train.jsonl", changed)}]
        heldout = [{**row, "prompt": f"{row['prompt']}xyz"} for row in rows[:3]]
        tiny_recipe["heldout"] = {"path": write("test.jsonl", heldout)}
        tiny_recipe["reward"] = [{"kind": f"{tmp_path / 'own.py'}:said"}]
        tiny_recipe["stage"] = [{"kind": "rl", "steps": 1}]
        path = tmp_path / "recipe.toml"
        path.write_text(to_toml(resolve(tiny_recipe, [], where="tiny")))
        return path

    return make


def test_rows_of_both_files_are_tried_and_counted(make_recipe: Make) -> None:
    text = dry_run(make_recipe())
    assert "reward of gold answers   mean 1 of 40 training tasks, mean 1 of 3 held-out ones" in text
    assert "reward of empty answers  mean 0 of 40 training tasks, mean 0 of 3 held-out ones" in text
    assert "40 to train on, drawn first: train.jsonl:" in text
    assert count_doubts(text) == 0


def test_one_row_of_forty_that_a_function_fails_on_is_named(make_recipe: Make) -> None:
    wanted = r"1 of 43 gold answers cannot be scored\. Task train\.jsonl:30 .*ValueError"
    with pytest.raises(UserError, match=wanted):
        dry_run(make_recipe(places=range(29, 30), times="three"))


def test_training_rows_without_answers_are_doubted_though_held_out_ones_have_them(make_recipe: Make) -> None:
    text = dry_run(make_recipe(answer=""))
    assert "reward in doubt" in text
    assert "of training tasks, all gold answers that were tried are blank" in text
    assert count_doubts(text) == 1


def test_training_answers_that_pay_nothing_are_doubted_though_held_out_ones_pay(make_recipe: Make) -> None:
    text = dry_run(make_recipe(times="-1"))  # a right answer costs a point
    assert "of training tasks, no gold answer is worth more than saying nothing" in text
    assert "and held-out ones, no gold" not in text
