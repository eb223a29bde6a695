"""Rows that would end a stage in the middle are found before its first step, wherever in the file they stand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from temper.build import first_model, resolve_objective
from temper.config import resolve
from temper.errors import UserError
from temper.stages.kinds import kind_of
from temper.stages.reading.data import open_data
from temper.stages.reading.fitting import require_rows


@pytest.fixture
def look(tiny_recipe: dict[str, Any], tmp_path: Path) -> Any:
    """Looks at rows of a file as a stage of a kind would; the model's context is 1,024 tokens, of one letter each."""

    def look(kind: str, rows: list[dict[str, Any]], max_length: int = 0) -> None:
        (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
        stage = {"kind": kind, "steps": 2, "trainer": {"examples_per_step": 2, "max_length": max_length}}
        recipe = {**tiny_recipe, "train": [{"path": str(tmp_path / "rows.jsonl")}], "stage": [stage]}
        recipe["model"]["new"] |= {"context": 1024}
        recipe = {key: value for key, value in recipe.items() if key not in ("heldout", "reward")}
        config = resolve(recipe, [], where="tiny")[0]
        kind, objective = kind_of(config), resolve_objective(config)
        data = open_data(config, objective, kind.reading, first_model(config, tmp_path))
        if (make_rows := kind.row_maker(objective, data)) is not None:
            require_rows(config, make_rows, data)

    return look


ROWS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "sft": ({"prompt": "ab", "completion": "cd"}, {"prompt": "ab", "completion": "c" * 1100}),
    "preference": (
        {"prompt": "ab", "chosen": "cd", "rejected": "ef"},
        {"prompt": "a", "chosen": "c", "rejected": "e" * 1100},
    ),
    "reward_model": (
        {"prompt": "ab", "chosen": "cd", "rejected": "ef"},
        {"prompt": "a", "chosen": "c" * 1100, "rejected": "e"},
    ),
}


@pytest.mark.parametrize("kind", ROWS)
def test_a_row_that_does_not_fit_is_named_with_its_length_and_the_limit(kind: str, look: Any) -> None:
    good, long = ROWS[kind]
    look(kind, [good] * 400)
    with pytest.raises(UserError, match=r"task rows\.jsonl:301: .*has 110\d tokens, more than the limit of 1024"):
        look(kind, [*[good] * 300, long, *[good] * 99])
    with pytest.raises(UserError, match=r"2 more rows are bad: rows\.jsonl:302, rows\.jsonl:303"):
        look(kind, [*[good] * 300, long, long, long])


@pytest.mark.parametrize("kind", ROWS)
def test_where_long_rows_are_dropped_only_a_file_of_nothing_else_is_refused(kind: str, look: Any) -> None:
    good, long = ROWS[kind]
    look(kind, [good, long, long], max_length=1000)
    with pytest.raises(UserError, match="more than the limit of 1000"):
        look(kind, [long, long], max_length=1000)


def test_a_mark_that_ends_a_turn_inside_an_answer_is_found(look: Any) -> None:
    good, _ = ROWS["preference"]
    with pytest.raises(
        UserError, match=r"task rows\.jsonl:291: an assistant's message holds a token that ends its turn"
    ):
        look("preference", [*[good] * 290, {**good, "rejected": "e<|end|>f"}])
