"""Guarantee: a result is read back as it was written, is never half written, and says how two budgets differ."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from temper.errors import UserError
from temper.runs import results
from temper.runs.results import PromptResult, SampleResult, SuiteResult, differing_budget, load, save

RESULT = SuiteResult(
    suite="sums",
    checkpoint="runs/demo",
    weights_sha256="ab" * 32,
    created=1.5,
    budget={"samples": 2, "temperature": 0.6, "prompts_sha256": "x"},
    constant_score=None,
    metrics={"pass@1": {"score": 0.5, "low": 0.1, "high": 0.9}},
    prompts=(
        PromptResult(
            task_id="rows.jsonl:1",
            prompt="1+1=\u2028?",
            gold="2",
            samples=(
                SampleResult(score=1.0, answer="2", num_tokens=3, events={"tool_call": 2}, text="Zwei: 2 \u00e9"),
                SampleResult(score=None, reason="timeout: too slow", num_tokens=0, num_turns=0, status="timeout"),
            ),
        ),
    ),
)


def test_a_result_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    save(RESULT, tmp_path / "deep" / "sums.json")
    assert load(tmp_path / "deep" / "sums.json") == RESULT
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["sums.json"]


def test_half_a_character_of_a_model_does_not_break_the_file(tmp_path: Path) -> None:
    sample = dataclasses.replace(RESULT.prompts[0].samples[0], text="broken \ud83d end")
    prompt = dataclasses.replace(RESULT.prompts[0], samples=(sample,))
    save(dataclasses.replace(RESULT, prompts=(prompt,)), tmp_path / "r.json")
    assert load(tmp_path / "r.json").prompts[0].samples[0].text == "broken \\ud83d end"


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    save(RESULT, path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(results.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save(dataclasses.replace(RESULT, suite="other"), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["r.json"]


def test_a_number_that_is_none_is_refused_before_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        save(dataclasses.replace(RESULT, metrics={"tokens": {"score": float("nan")}}), tmp_path / "r.json")
    assert not (tmp_path / "r.json").exists()


def test_a_sample_has_a_score_or_says_why_not() -> None:
    with pytest.raises(AssertionError, match="says why not"):
        SampleResult(score=None, num_tokens=1)
    with pytest.raises(AssertionError, match="says why not"):
        SampleResult(score=0.0, reason="the verifier crashed", num_tokens=1)
    with pytest.raises(AssertionError, match="finite"):
        SampleResult(score=float("nan"), num_tokens=1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not a result"),
        ("[]", "format 1"),
        ('{"format": 7}', "found 7"),
        ('{"format": 1, "prompts": [{}]}', "damaged"),
        ('{"format": 1, "prompts": []}', "damaged"),
    ],
)
def test_other_files_are_refused_with_their_name(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        load(path)
    assert "other.json" in str(caught.value)


def test_a_missing_file_is_a_clear_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="temper eval"):
        load(tmp_path / "none.json")


def test_differing_budgets_are_said_one_by_one() -> None:
    other = dataclasses.replace(RESULT, budget={"samples": 8, "temperature": 0.6, "seed": 1, "prompts_sha256": "x"})
    assert differing_budget(RESULT, RESULT) == []
    assert differing_budget(RESULT, other) == ["samples: 2 and 8", "seed: nothing and 1"]
    read = json.loads(json.dumps(dict(RESULT.budget)))
    assert differing_budget(RESULT, dataclasses.replace(RESULT, budget=read)) == []
