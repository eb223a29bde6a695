"""`temper score-records`: every episode gets the score of its own task, people's scores go where they belong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from temper.cli import app
from temper.commands.judging.score_records import ScoreRequest, score_records
from temper.errors import UserError
from temper.serve.episodes import read_episodes
from temper.serve.records import RecordFile
from temper.types import ScoreKind
from tests.fakes.recorded import SPEECH, ask, completion, say, write_episode


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """Three questions, one of them twice; the client asks in words of its own."""
    file = RecordFile(tmp_path / "r.db", SPEECH)
    for name, question, text in (("a", "1+1", "2"), ("b", "1+1", "3"), ("c", "2+2", "4")):
        write_episode(file, name, [say(text, completion([2], [7, 1]))], [ask(f"Please: {question}")])
    write_episode(file, "chatcmpl-d", [say("9", completion([2], [7, 1]))], [ask("Please: 3+3")], has_session=False)
    file.close()
    return tmp_path / "r.db"


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def scores(path: Path) -> dict[str, float | None]:
    return {episode.id: episode.played.score.value for episode in read_episodes(path) if episode.judge}


def test_a_verifier_scores_episodes_by_the_gold_answer_of_what_was_asked(records: Path, tmp_path: Path) -> None:
    gold = write_rows(tmp_path / "gold.jsonl", [{"prompt": "1+1", "answer": "2"}, {"prompt": "2+2", "answer": "4"}])
    wanted = ScoreRequest(reward="exact", tasks=gold, template="Please: {prompt}")
    found = score_records(records, wanted)
    assert scores(records) == {"a": 1.0, "b": 0.0, "c": 1.0}
    assert found.unknown == ("chatcmpl-d/0",)
    assert not score_records(records, wanted).given, "what has a score is not judged again"
    with pytest.raises(UserError, match=r"none of its prompts is what a client asked, e\.g\. 'Please: 1"):
        score_records(records, ScoreRequest(reward="exact", tasks=gold, is_again=True))


def test_a_failing_verifier_leaves_a_reason_and_no_number(records: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def score(prompt, response, answer):\n    raise OSError('no network')\n")
    ran = CliRunner().invoke(app, ["score-records", str(records), "--reward", f"{tmp_path}/broken.py:score"])
    assert ran.exit_code == 1
    assert "no network" in ran.output
    assert {episode.played.score.kind for episode in read_episodes(records)} == {ScoreKind.ERROR}


def test_people_score_by_session_or_request(records: Path, tmp_path: Path) -> None:
    filled = tmp_path / "filled.jsonl"
    ran = CliRunner().invoke(app, ["score-records", str(records), "--export", str(filled)])
    assert ran.exit_code == 0, ran.output
    rows = [json.loads(line) for line in filled.read_text().splitlines()]
    assert rows[0] == {
        "id": "a",
        "score": None,
        "messages": [{"role": "user", "content": "Please: 1+1"}, {"role": "assistant", "content": "2"}],
    }
    rows[0]["score"] = 0.75
    write_rows(filled, [*rows, {"id": "chatcmpl-d", "score": -1}])
    assert CliRunner().invoke(app, ["score-records", str(records), "--scores", str(filled)]).exit_code == 0
    assert scores(records) == {"a": 0.75, "chatcmpl-d/0": -1.0}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"id": "A", "score": 1}], 'no recorded episode is called "A"'),
        ([{"id": "a"}], "line 1: the row is"),
        ([{"id": "a", "score": "good"}], "no finite number"),
        ([{"id": "a", "score": float("nan")}], "no finite number"),
        ([{"id": "a", "score": 1}, {"id": "a", "score": 0}], "line 2: episode .a. has a score already, in this file"),
    ],
)
def test_scores_that_are_none_are_refused_and_nothing_is_written(
    rows: list[dict[str, Any]], said: str, records: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        score_records(records, ScoreRequest(scores=write_rows(tmp_path / "s.jsonl", rows)))
    assert scores(records) == {}


def test_a_persons_score_is_not_replaced_without_being_told_to(records: Path, tmp_path: Path) -> None:
    given = write_rows(tmp_path / "s.jsonl", [{"id": "a", "score": 1}])
    score_records(records, ScoreRequest(scores=given))
    with pytest.raises(UserError, match="has a score already, by people; --again replaces it"):
        score_records(records, ScoreRequest(scores=given))
    score_records(records, ScoreRequest(reward="length", options={"high": 9}))
    assert scores(records)["a"] == 1.0
    with pytest.raises(UserError, match="use one after the other"):
        score_records(records, ScoreRequest(scores=given, reward="format"))
