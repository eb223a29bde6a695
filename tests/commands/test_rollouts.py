"""What a policy said, read in a terminal."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from temper.commands.rollouts import read_rollouts, render
from temper.commands.training.train import train
from temper.config import resolve, to_toml
from temper.dashboard.queries import RolloutFilter
from temper.errors import UserError
from temper.runs.reader import RunReader


@pytest.fixture
def run(tiny_recipe: dict[str, Any], tmp_path: Path) -> Path:
    """Two stages of two steps; the second draws 16 answers a step."""
    for stage in tiny_recipe["stage"]:
        stage["steps"] = 2
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(resolve(tiny_recipe, [], where="tiny")))
    return train(recipe, run=tmp_path / "run")


def lines(run: Path, num: int = 5, **wanted: Any) -> str:
    found, has_more = read_rollouts(run, RolloutFilter(**wanted), num)
    return "\n".join(render(found, has_more=has_more))


def test_prompt_answer_gold_and_reward_stand_below_each_other(run: Path) -> None:
    with RunReader(run) as reader:
        newest = reader.trajectories(stage=1, step=2)[0]
    shown = lines(run, num=1).split("\n")
    assert shown[0].startswith(f"--- rl step 2, task {newest.task_id}, answer 1, {newest.num_tokens} tokens, ")
    said = dict(line.split(maxsplit=1) for line in shown[1:5] if len(line.split()) > 1)
    assert (said["user"], said["gold"]) == (newest.prompt[-1].content, newest.answer)
    assert said["reward"].startswith(f"{newest.score:.3f} (edit ")
    assert shown[-1] == "1 shown, newest first; there are more: --num, --step, --find"


def test_filters_choose_and_what_is_all_there_says_nothing_of_more(run: Path) -> None:
    found, has_more = read_rollouts(run, RolloutFilter(step=1), 100)
    assert len(found) == 16
    assert not has_more
    assert {(row["stage"], row["step"]) for row in found} == {(2, 1)}
    assert json.loads(json.dumps(found)) == found, "--json writes it as it is"
    best = max(row["score"] for row in found)
    paid, _ = read_rollouts(run, RolloutFilter(step=1, min_reward=best), 100)
    assert [row["member"] for row in paid] == [row["member"] for row in found if row["score"] >= best]
    assert lines(run, q="no policy says this") == "no rollouts match"


def test_lost_texts_errors_and_turns_are_told(run: Path) -> None:
    with sqlite3.connect(run / "run.db") as database:
        database.execute("UPDATE trajectories SET text = NULL, messages = NULL WHERE step = 2 AND member = 0")
        database.execute(
            "UPDATE trajectories SET score = NULL, score_kind = 'error', reason = 'it slept' WHERE member = 1"
        )
        turns = [
            {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]},
            {"role": "tool", "content": "3\n4"},
        ]
        database.execute("UPDATE trajectories SET messages = ? WHERE member = 2", [json.dumps(turns)])
    database.close()
    shown = lines(run, num=4, step=2)
    assert "its text went to make room for newer ones: rollout.transcripts_gb" in shown
    assert "reward    none: it slept" in shown
    assert 'assistant [{"name": "add"}]\ntool      3\n          4\n' in shown


def test_what_is_not_there_is_refused_by_name(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no stage 3\. Its stages: 1 \(sft\), 2 \(rl\)"):
        read_rollouts(run, RolloutFilter(stage=2), 5)
    with pytest.raises(UserError, match="is not a run directory"):
        read_rollouts(tmp_path, RolloutFilter(), 5)
