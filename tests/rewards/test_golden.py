"""The golden sets: large enough, both verdicts in every kind, labels that the second checker does not contradict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from temper.commands.verify import cross_check
from temper.errors import UserError
from temper.rewards.golden.make_math import rows as made_rows
from temper.rewards.golden.rows import FOLDER, load_attacks, load_golden

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
