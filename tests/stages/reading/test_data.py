"""What a stage reads: sources told apart where they differ, and judged by whom they name."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest

from temper.build import first_model, resolve_objective
from temper.commands.training.train import train_stages
from temper.config import resolve
from temper.errors import UserError
from temper.models.load import load_tokenizer
from temper.runs.reader import RunReader
from temper.serve.episodes import write_scores
from temper.serve.records import RecordFile, Speech
from temper.stages.kinds import kind_of
from temper.stages.reading.data import StageData, open_data
from temper.types import Score, Trajectory
from tests.fakes.recorded import ask, completion, say, write_episode


def opened(table: dict[str, Any], folder: Path) -> StageData:
    (config,) = resolve(table, [], where="test")
    return open_data(config, resolve_objective(config), kind_of(config).reading, first_model(config, folder))


@pytest.fixture
def mixed(tiny_recipe: dict[str, Any]) -> dict[str, Any]:
    """Words to spell backward, judged by how near they are, and words to repeat, judged by another reward."""
    words = {"min_letters": 1, "max_letters": 2}
    table = copy.deepcopy(tiny_recipe)
    table["train"] = [
        {"generator": "spell_backward", "seed": 1, "options": words, "rewards": ["edit"]},
        {"generator": "rearrange", "seed": 1, "rewards": ["letters"], "template": "x{prompt}", "weight": 2,
         "options": {"min_letters": 2, "max_letters": 2}},
    ]  # fmt: skip
    table["heldout"] = [
        {"generator": "spell_backward", "seed": 2, "size": 8, "options": {"min_letters": 2, "max_letters": 2},
         "rewards": ["edit"]},
        {"generator": "rearrange", "seed": 2, "size": 4, "rewards": ["letters"], "template": "x{prompt}",
         "options": {"min_letters": 2, "max_letters": 2}},
    ]  # fmt: skip
    table["reward"] = [{"kind": "edit"}, {"kind": "rearranged", "name": "letters"}]
    table["stage"] = [{**table["stage"][1], "steps": 3}]
    return table


def test_sources_are_told_apart_where_they_differ_and_only_there(mixed: dict[str, Any], tmp_path: Path) -> None:
    data = opened(mixed, tmp_path / "a")
    assert {task.source for task in data.probe} == {"spell_backward", "rearrange"}
    assert [task.source for task in data.heldout] == ["spell_backward"] * 8 + ["rearrange"] * 4
    shown = {task.source: data.renderer.prompt_messages(task)[-1].content for task in data.heldout}
    assert shown["rearrange"].startswith("x")
    assert len(shown["spell_backward"]) == 2
    mixed["train"] = [{"generator": "spell_backward", "seed": 1}]
    mixed["heldout"] = {"generator": "spell_backward", "seed": 2, "size": 8}
    assert {task.source for task in opened(mixed, tmp_path / "b").probe} == {""}


def test_a_mixture_trains_each_source_by_its_own_judge_and_is_measured_by_source(
    mixed: dict[str, Any], tmp_path: Path
) -> None:
    run = train_stages(resolve(mixed, [], where="test"), run=tmp_path / "run")
    with RunReader(run) as reader:
        names = {result.name for result in reader.evaluations()}
        metrics = {name for step in (1, 2, 3) for name in reader.metrics_at(0, step)}
        scored = [trajectory for step in (1, 2, 3) for trajectory in reader.trajectories(0, step)]
        results = {result.name: result for result in reader.evaluations() if result.step == 3}
    assert names == {
        "greedy", "greedy/spell_backward", "greedy/rearrange", "sampled", "sampled/spell_backward", "sampled/rearrange",
    }  # fmt: skip
    for what in ("groups", "reward", "length", "truncated", "degenerate"):
        assert {f"source/spell_backward/{what}", f"source/rearrange/{what}"} <= metrics
    assert {tuple(trajectory.parts) for trajectory in scored} == {("edit",), ("letters",)}
    whole, first, second = (results[f"greedy{name}"] for name in ("", "/spell_backward", "/rearrange"))
    assert (whole.num_prompts, first.num_prompts, second.num_prompts) == (12, 8, 4)
    assert whole.score == pytest.approx((8 * first.score + 4 * second.score) / 12)


def test_a_task_that_its_judge_cannot_score_is_refused_and_another_judges_is_not_asked(
    mixed: dict[str, Any], tmp_path: Path
) -> None:
    rows = [{"prompt": "ab", "answer": "ba"}, {"prompt": "cd", "answer": ""}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    mixed["train"][0] = {"path": str(file), "rewards": ["edit"]}
    with pytest.raises(UserError, match=r'reward "edit" cannot score task rows\.jsonl:2'):
        opened(mixed, tmp_path / "a")
    mixed["train"][0]["rewards"] = ["repetition"]
    mixed["reward"].append({"kind": "repetition"})
    opened(mixed, tmp_path / "b")


def test_held_out_answers_are_judged_by_the_verifier_that_their_set_names(
    mixed: dict[str, Any], tmp_path: Path
) -> None:
    """A name of the training reward alone leaves the held-out verifier whole."""
    mixed["evaluation"] = {"reward": [{"kind": "exact"}, {"kind": "contains", "name": "letters"}]}
    data = opened(mixed, tmp_path)
    first, last = data.heldout[0], data.heldout[-1]

    async def parts(task: Any) -> list[str]:
        return list((await data.verifier.score(task, Trajectory.saying(task.id, "zz")))[1])

    assert asyncio.run(parts(first)) == ["exact", "letters"]
    assert asyncio.run(parts(last)) == ["letters"]


def test_a_file_of_records_whose_prompts_all_lie_in_one_before_it_adds_its_attempts(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    table = {key: value for key, value in tiny_recipe.items() if key not in ("heldout", "reward")}
    table["train"] = [{"records": str(tmp_path / day / "chats.db")} for day in ("mon", "tue")]
    table["stage"] = [{"kind": "preference"}]
    (config,) = resolve(table, [], where="test")
    model = first_model(config, tmp_path / "model")
    for day in ("mon", "tue"):
        (tmp_path / day).mkdir()
        file = RecordFile(tmp_path / day / "chats.db", Speech.of(load_tokenizer(model)))
        write_episode(file, day, [say(day, completion([2, 5], [6, 1]))], [ask("q")])
        file.close()
        write_scores(tmp_path / day / "chats.db", {1: Score.of(0.5)}, "people")
    data = open_data(config, resolve_objective(config), kind_of(config).reading, model)
    assert {data.stream.next()[1].id for _ in range(20)} == {"1/chats.db:1"}
    assert [len(own) for own in data.recorded.values()] == [2]
    assert {task.source for task in data.probe} == {"chats"}
