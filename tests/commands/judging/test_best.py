"""Guarantee: `temper best` answers every prompt with its best sample, and says what is missing before it draws."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from temper.commands.judging.best import BestOf, BestRequest, best, open_questions, render
from temper.commands.judging.evaluate import SuiteRequest
from temper.errors import UserError
from temper.models.tiny import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny", layers=2, width=32, heads=2, kv_heads=1, mlp_width=64, context=32,
        alphabet="abcdefghijklmnopqrstuvwxyz", seed=0,
    )  # fmt: skip


def ask(model: Path, wanted: BestRequest, out: Path | None = None, **asked: object) -> BestOf:
    settings = SuiteRequest(**{"suite": "", "max_new_tokens": 4, **asked})  # type: ignore[arg-type]
    return best(model, settings, wanted, out=out, note=lambda line: None)


def test_texts_and_files_are_answered_with_their_best_sample(model: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "ab", "answer": "ba"}\n{"prompt": "cd", "answer": "dc"}\n')
    out = tmp_path / "best.jsonl"
    wanted = BestRequest(prompts=(str(tasks),), reward="edit", n=4, answer_field="answer")
    found = ask(model, wanted, out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["ab", "cd"]
    for row in rows:
        assert row["score"] == max(row["scores"]) == row["scores"][row["index"]]
        assert row["index"] == row["scores"].index(row["score"])
        assert len(row["scores"]) == 4
    assert [gain.n for gain in found.gains] == [1, 2, 4]
    assert ask(model, wanted) == found, "the same seed says the same"
    fewer = ask(model, BestRequest(prompts=(str(tasks),), reward="edit", n=2, answer_field="answer"))
    assert [pick.scores for pick in fewer.picks] == [pick.scores[:2] for pick in found.picks]
    text = ask(model, BestRequest(prompts=("ab", "cd"), reward="repetition", n=2))
    assert [pick.task_id for pick in text.picks] == ["prompt:1", "prompt:2"]


def test_a_suite_brings_prompts_and_reward(model: Path, suite: str) -> None:
    found = ask(model, BestRequest(n=3), suite=suite, limit=2)
    assert [len(pick.scores) for pick in found.picks] == [3, 3]
    console = Console(width=200)
    with console.capture() as shown:
        console.print(render(found))
    for words in ("best of", "expected score", "KL at most", "0.0000 nats", "score"):
        assert words in shown.get()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (BestRequest(), "needs prompts and a reward"),
        (BestRequest(prompts=("ab",)), "needs prompts and a reward"),
        (BestRequest(prompts=(" ",), reward="length"), "prompt 1 is empty"),
        (BestRequest(prompts=("nowhere.jsonl",), reward="length"), "nowhere.jsonl"),
    ],
)
def test_what_is_missing_is_said(wanted: BestRequest, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_questions(SuiteRequest(suite=""), wanted)


def test_a_reward_that_needs_gold_answers_says_how_to_give_them(model: Path) -> None:
    with pytest.raises(UserError, match="--answer-field"):
        ask(model, BestRequest(prompts=("ab",), reward="exact", n=2))


def test_options_without_a_reward_are_not_ignored(suite: str) -> None:
    with pytest.raises(UserError, match="none is given"):
        open_questions(SuiteRequest(suite=suite), BestRequest(options={"x": 1}))
