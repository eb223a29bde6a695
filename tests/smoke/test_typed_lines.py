"""Every line with `temper` in README, docs and examples can be typed: its verb accepts these arguments."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from temper.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "temper/commands/starter/recipe.toml"]
Refusal = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""What a verb answers arguments with that it does not accept; typer brings a copy of click."""
ANY_OF = {"best": ("--reward", "--suite"), "label-steps": ("--suite",), "compare": ("--suite", "RESULT", ".json")}
"""Options of which one must be there, though each alone is optional."""


def typed_lines(page: Path) -> Iterator[str]:
    """Lines of code blocks and comments that begin with the program; inline code with an argument that is no option."""
    text = page.read_text().replace("\\\n", " ")
    for line in text.splitlines():
        if found := re.match(r"^(?:    |#\s+|\$ )?(?:\.venv/bin/)?(temper [\w-].*)$", line):
            yield found[1]
    for code in re.findall(r"(?<!`)`(?:\.venv/bin/)?(temper [a-z][^`\n]*)`(?!`)", text):
        if not all(word.startswith("-") for word in code.split()[2:]):  # else it only names a verb
            yield code


def arguments_of(line: str) -> list[str]:
    """Without comments and explanations behind; what stands in brackets is taken as given."""
    command = re.split(r"\s{2,}|\s#", line)[0]
    words = shlex.split(re.sub(r"[\[\]](?=[\s-]|$|[A-Z])|\.\.\.", " ", command))
    return words[1:]


def parse(arguments: list[str]) -> None:
    """As the command line would, up to the call of the verb. Raises Refusal."""
    command: Any = get_command(app)
    context = command.make_context("temper", list(arguments), resilient_parsing=not arguments)
    rest = list(arguments)
    while hasattr(command, "commands"):  # a group of verbs
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, list(rest))


LINES = sorted({(page.name, line) for page in PAGES for line in typed_lines(page)})


@pytest.mark.parametrize(("page", "line"), LINES, ids=[f"{page}: {line[:60]}" for page, line in LINES])
def test_a_line_of_the_documentation_is_accepted_as_typed(page: str, line: str) -> None:
    arguments = arguments_of(line)
    try:
        parse(arguments)
    except Refusal as error:
        pytest.fail(f"{page}: {line}: {error.format_message()}")
    if len(arguments) > 1 and (needed := ANY_OF.get(arguments[0])):
        assert any(word in " ".join(arguments) for word in needed), f"{page}: {line} lacks one of {needed}"


def test_lines_are_found_and_a_wrong_one_would_be_seen() -> None:
    assert len(LINES) > 60
    assert {page for page, _ in LINES} >= {"README.md", "evaluation.md", "rejection.md", "recipe.md"}
    with pytest.raises(Refusal, match="suite"):
        parse(arguments_of("temper scale CHECKPOINT          accuracy against tokens"))
    with pytest.raises(Refusal, match="--no-such"):
        parse(arguments_of("temper train r.toml [--no-such]"))
    with pytest.raises(Refusal, match="No such command"):
        parse(arguments_of("temper trian r.toml"))
    parse(arguments_of("temper train r.toml [--set optim.learning_rate=1e-4] [--dry-run] [--run DIR]"))


def test_the_readme_says_what_to_install_where_and_how_to_activate_it() -> None:
    """A clone, the Python that pyproject.toml wants, a GPU, and the line after which `temper` is found."""
    text = (ROOT / "README.md").read_text().partition("## From Python")[0]
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    assert f"Python {wanted}" in text
    assert "git clone" in text
    assert ". .venv/bin/activate" in text
    assert ".venv/bin/temper watch runs/demo" in text
    assert "GPU" in text
    assert 'pip install -c constraints.txt -e ".[all]"' in text
