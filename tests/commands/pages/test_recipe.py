"""`temper recipe` and docs/recipe.md are what the sections say."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from temper.commands.pages.recipe import explain, page_text, sections, write_page
from temper.config import RunConfig, known_keys, section_of
from temper.errors import UserError

PAGE = Path(__file__).parents[3] / "docs" / "recipe.md"


def test_the_page_in_the_repository_is_that_of_the_code() -> None:
    assert PAGE.read_text() == page_text(), "run: temper recipe --page docs"


def test_the_page_has_every_key_once_with_type_default_and_help(tmp_path: Path) -> None:
    text = write_page(tmp_path).read_text()
    for name in known_keys():
        (line,) = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
        cells = [cell.strip() for cell in line.replace("\\|", "").strip("| ").split(" | ")]
        assert len(cells) == 4, line
        assert all(cells), f"{name} lacks something"


def test_every_key_and_every_section_has_help() -> None:
    assert [key.name for section in sections() for key in section.keys if not key.help] == []
    assert [section.name for section in sections() if not section.help] == []


def test_the_fields_of_every_section_are_listed() -> None:
    listed = {section.name: {key.name.rpartition(".")[2] for key in section.keys} for section in sections()}

    def compare(model: type[BaseModel], name: str) -> None:
        inner = {key: section_of(field.annotation) for key, field in model.model_fields.items()}
        assert listed[name] == {key for key, found in inner.items() if found is None}
        for key, found in inner.items():
            if found is not None:
                compare(found, f"{name}.{key}" if name else key)

    compare(RunConfig, "")


def test_one_key_is_explained_with_type_bounds_default_and_help() -> None:
    assert (
        explain("optim.learning_rate") == "optim.learning_rate: number >= 0; default 1e-06\n  Of AdamW, after warm-up."
    )
    assert explain("sampling.top_p").startswith("sampling.top_p: number > 0, <= 1; default 1.0\n")
    assert explain("reward.kind").startswith("reward.kind: text; default required\n")
    assert "name or table; default unset" in explain("objective.gate")
    assert 'default ""' in explain("train.generator")


def test_a_section_is_explained_with_all_its_keys_and_the_tables_inside() -> None:
    said = explain("model")
    assert said.startswith("[model]  ")
    assert "\n\nmodel.dtype: " in said
    assert "\n\nmodel.lora.rank: " in said
    assert explain("[[train]]").startswith("[[train]]  ")


def test_a_name_without_its_section_finds_all_that_bear_it() -> None:
    said = explain("top_p")
    assert "sampling.top_p: " in said
    assert "evaluation.top_p: " in said


@pytest.mark.parametrize(
    ("name", "near"),
    [("optim.learnin_rate", "optim.learning_rate"), ("samplin", "sampling"), ("grop_size", "rollout.group_size")],
)
def test_a_misspelt_name_is_answered_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(UserError, match=f'Did you mean "{near}"'):
        explain(name)
