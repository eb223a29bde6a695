"""Solutions of a suite become a file of labelled steps, the same one every time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from temper.commands.judging.evaluate import SuiteRequest
from temper.commands.judging.label_steps import label_steps
from temper.errors import UserError
from temper.models.tiny import make_tiny_model
from temper.stages.step_labels import Labelling
from temper.tasks.dataset import read_file

SUITE = """
[data]
path = "rows.jsonl"

[[reward]]
kind = "edit"

[decoding]
temperature = 1.0
samples = 2
max_new_tokens = 8
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny", layers=1, width=16, heads=2, kv_heads=1, mlp_width=24, context=32,
        alphabet="abc/", seed=0,
    )  # fmt: skip


def suite_of(folder: Path, rows: list[dict[str, str]], suite: str = SUITE) -> SuiteRequest:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own.toml").write_text(suite)
    return SuiteRequest(suite=str(folder / "own.toml"))


def test_given_solutions_are_labelled_alike_every_time_and_read_back(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "ab", "answer": "a/b", "solution": "a/b"}, {"prompt": "b", "answer": "c", "solution": "b/a/c"}]
    asked, rules, said = suite_of(tmp_path, rows), Labelling(separator="/", samples=2), list[str]()
    first = label_steps(model, asked, rules, out=tmp_path / "one.jsonl", note=said.append)
    assert [labelled.steps for labelled in first] == [("a", "b"), ("b", "a", "c")]
    assert first[0].rates[-1] == 1.0  # the solution is the answer itself
    assert label_steps(model, asked, rules, out=tmp_path / "two.jsonl", note=said.append) == first
    assert (tmp_path / "one.jsonl").read_text() == (tmp_path / "two.jsonl").read_text()
    tasks = read_file(tmp_path / "one.jsonl").tasks
    assert [str(task.extra["step_labels"]).count(",") for task in tasks] == [1, 2]
    assert "2 solutions, 5 steps" in said[-1]


def test_tasks_without_a_solution_are_solved_by_the_model(model: Path, tmp_path: Path) -> None:
    asked, said = suite_of(tmp_path, [{"prompt": "ab", "answer": "a/b"}]), list[str]()
    labelled = label_steps(
        model, asked, Labelling(separator="/", samples=1), out=tmp_path / "o.jsonl", note=said.append
    )
    assert 1 <= len(labelled) <= 2
    assert all(step and "/" not in step for one in labelled for step in one.steps)


def test_what_cannot_be_labelled_or_written_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "ab", "answer": "a", "solution": "a/b/c/a/b/c"}]
    with pytest.raises(UserError, match=r"must end in \.jsonl"):
        label_steps(model, suite_of(tmp_path, rows), Labelling(separator="/"), out=tmp_path / "o.json")
    said: list[str] = []
    with pytest.raises(UserError, match="not one solution could be labelled"):
        label_steps(
            model, suite_of(tmp_path, rows), Labelling(separator="/"), out=tmp_path / "o.jsonl", note=said.append
        )
    assert "longer than max_new_tokens=8" in said[-1]
    with pytest.raises(UserError, match="cannot encode 'z'"):
        label_steps(
            model,
            suite_of(tmp_path, [{**rows[0], "solution": "z"}]),
            Labelling(separator="/"),
            out=tmp_path / "o.jsonl",
        )
