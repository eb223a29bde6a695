"""The golden sets: large enough, both verdicts in every kind, labels that the second checker does not contradict."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from temper.commands.judging.verify import cross_check, verify
from temper.errors import UserError
from temper.rewards.golden.golden_rows import FOLDER, load_attacks, load_golden
from temper.rewards.golden.make_math import rows as made_rows
from temper.rewards.golden.make_pairs import gold_answers, pairs

pytestmark = pytest.mark.heavy


@pytest.mark.parametrize(("kind", "least"), [("math", 400), ("code", 60), ("format", 80)])
def test_golden_sets_are_large_and_hold_both_verdicts(kind: str, least: int) -> None:
    rows = load_golden(kind)
    assert len(rows) >= least
    right = sum(row.is_correct for row in rows)
    assert 0.25 < right / len(rows) < 0.75
    assert len({(row.answer, row.tests, row.response, str(row.options)) for row in rows}) == len(rows)


def test_math_rows_are_what_the_generator_makes() -> None:
    stored = [json.loads(line) for line in (FOLDER / "math.jsonl").read_text().split("\n") if line]
    assert stored == list(made_rows())


def test_math_pairs_are_what_the_rules_make_of_the_math_data_set() -> None:
    data = Path(os.environ.get("TEMPER_TEST_DATA", Path(__file__).parents[2].parent / "shared" / "data")) / "math"
    files = [data / "train.jsonl", data / "test.jsonl"]
    if not all(path.exists() for path in files):
        pytest.skip(f"{files[0]} or {files[1]} is not here; set TEMPER_TEST_DATA to the folder with the data files")
    stored = [json.loads(line) for line in (FOLDER / "math_pairs.jsonl").read_text().split("\n") if line]
    assert stored == list(pairs(gold_answers(files)))


def test_the_math_reward_is_wrong_on_at_most_half_a_percent_of_any_part() -> None:
    pytest.importorskip("math_verify")
    result = verify("math")
    assert result.is_fine
    rates = [rate for both in result.parts.values() for rate in both]
    assert len(rates) == 8  # two shipped files, two parts of the third; either way
    assert [rate for rate in rates if rate.count > 0.005 * rate.total] == []


def test_the_second_checker_contradicts_no_label_and_judges_most() -> None:
    rows = load_golden("math")
    judged, against = cross_check(rows)
    assert against == []
    assert judged > 0.6 * len(rows)


def test_no_attack_is_labelled_correct_and_every_kind_is_attacked() -> None:
    attacks = load_attacks()
    assert not any(row.is_correct for row in attacks)
    assert {row.kind for row in attacks} == {"math", "code", "format", "judge", "tags", "json_schema", "ifeval"}
    assert {row.kind for row in load_attacks("code")} == {"code"}


@pytest.mark.parametrize("line", ["no json", '{"response": "x"}', '{"response": 1, "is_correct": true}', "[]", ""])
def test_a_bad_row_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(line)
    with pytest.raises(UserError, match=r"own\.jsonl"):
        load_golden("math", path)


def test_a_kind_without_a_golden_set_says_what_to_do() -> None:
    with pytest.raises(UserError, match="--golden FILE"):
        load_golden("length")
