"""docs/reference/ is what the registries, the command line and the package say."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from typer.main import get_command

import temper
from temper.catalogue import ENVIRONMENTS, GENERATORS, REWARDS
from temper.cli import app
from temper.commands.pages.catalogue import environments_text, rewards_text
from temper.commands.pages.command_line import command_line_text
from temper.commands.pages.entries import first_line, options_line, plain
from temper.commands.pages.python import python_text
from temper.commands.pages.reference import REFERENCE, reference_texts, write_pages
from temper.objectives import PRESETS
from temper.rewards.form.length import LengthReward

DOCS = Path(__file__).parents[3] / "docs"
AGAIN = "run: temper pages docs"


def test_the_pages_in_the_repository_are_those_of_the_code() -> None:
    texts = reference_texts(get_command(app), temper)
    assert {path for path in texts if path.startswith("reference/")} == {
        f"reference/{path.name}" for path in (DOCS / "reference").glob("*.md")
    }
    for path, text in texts.items():
        assert (DOCS / path).read_text() == text, f"{path} is old. {AGAIN}"


def test_all_pages_are_written_where_docs_has_them(tmp_path: Path) -> None:
    written = [path.relative_to(tmp_path) for path in write_pages(tmp_path, get_command(app), temper)]
    assert len(written) == 10
    assert [path for path in written if not (DOCS / path).is_file()] == []


def test_every_name_that_a_recipe_can_say_has_its_place() -> None:
    rewards, environments, presets = rewards_text(), environments_text(), REFERENCE["reference/presets.md"]()
    assert [name for name in REWARDS if f"\n### {name}\n" not in rewards] == []
    assert [name for name in ENVIRONMENTS if f"\n### env {name}\n" not in environments] == []
    assert [name for name in GENERATORS if f"\n### generator {name}\n" not in environments] == []
    assert [name for name in PRESETS if f"\n### {name}\n" not in presets] == []


def test_every_name_says_what_it_is() -> None:
    rows = [line for text in (rewards_text(), environments_text()) for line in text.splitlines() if line[:3] == "| ["]
    assert len(rows) == len(REWARDS) + len(ENVIRONMENTS) + len(GENERATORS)
    assert [line for line in rows if not line.rstrip("| ").partition(") |")[2].strip()] == []


def test_every_option_of_a_verb_is_listed_with_its_help() -> None:
    text = command_line_text(get_command(app))
    for name, verb in get_command(app).commands.items():  # type: ignore[attr-defined]
        for part in getattr(verb, "params", []):
            if part.param_type_name == "option" and part.name != "help":
                assert f"`{part.opts[0]}" in text.partition(f"## temper {name}\n")[2].partition("\n## ")[0]
    assert "| `--port PORT` | `8777` | 0 picks a free one |" in text
    assert "Usage: temper watch [OPTIONS] RUN_OR_FOLDER...\n" in text
    assert "\n## temper model fetch\n" in text


def test_every_public_name_of_the_package_is_explained() -> None:
    text = python_text(temper)
    for name in temper.__all__:
        if not name.startswith("_"):
            assert f"\n## {name}\n" in text
    assert "- `answer: str | None = None`: The gold answer; None when the reward needs none." in text
    assert "- `best: Path`: The checkpoint with the best held-out score" in text


def test_options_have_their_defaults_and_what_is_required_is_named() -> None:
    assert options_line(LengthReward, "") == "Options: `high` (required), `low` (0), `margin` (0)."
    assert options_line(lambda **rest: None, "and others") == "Options: and others."
    assert options_line(lambda: None, "and others") == "No options."


def test_what_a_docstring_says_is_text_and_no_tag_of_the_page() -> None:
    assert plain("in <think> 2 * 3, `a<b*c`, ```json") == "in &lt;think> 2 \\* 3, `a<b*c`, \\`\\`\\`json"
    assert first_line("One\nline.\n\nMore.") == "One line."


def test_a_changed_default_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    before = rewards_text()
    signature = inspect.signature(LengthReward)
    changed = [p.replace(default=7) if p.name == "low" else p for p in signature.parameters.values()]
    monkeypatch.setattr(LengthReward, "__signature__", signature.replace(parameters=changed), raising=False)
    assert rewards_text() != before
