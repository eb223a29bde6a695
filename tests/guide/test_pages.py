"""Every page of the guide shows what it says: its command runs, and prints again what the page says it printed."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from temper.cli import app
from temper.cli.console import out
from temper.errors import UserError
from temper.guide.pages import TOPICS, GuidePage, find_page, missing_line, read_page, read_pages
from temper.guide.running import command_lines, require_clone

ROOT = Path(__file__).parents[2]
PAGES = read_pages()
HEAVY = {3, 12, 23, 25, 27, 28}
"""Pages whose command takes more than two seconds in a process that has imported everything."""
PAGE = """# 7. Why?

**In short.** It is
so.

```bash
temper presets grpo
```

It printed:

```text
gate   clip(low=0.2)
...
loss   -1.5e-3
```
"""


def page_of(folder: Path, text: str) -> GuidePage:
    (folder / "07_why.md").write_text(text)
    return read_page(folder / "07_why.md")


def run_here(page: GuidePage) -> str:
    """In this process: importing torch anew for each page would take minutes."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        if page.language == "python":
            exec(compile(page.command, page.path.name, "exec"), {"__name__": "__main__"})
            return output.getvalue()
        for words in command_lines(page):
            app(words[3:], standalone_mode=False)
    return output.getvalue()


def params() -> list[object]:
    heavy = pytest.mark.heavy
    return [pytest.param(page, id=page.path.stem, marks=[heavy] * (page.number in HEAVY)) for page in PAGES]


@pytest.mark.parametrize("page", params())
def test_a_page_prints_again_what_it_says_it_printed(
    page: GuidePage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(out, "_width", 110)  # made already, with the width of whatever terminal this is
    output = run_here(page)
    shown = output + capsys.readouterr().out
    assert missing_line(page, shown) is None, shown


def test_pages_are_numbered_and_named_so_that_one_finds_them() -> None:
    assert [page.number for page in PAGES] == list(range(1, 36))
    for page in PAGES:
        assert page.path.name.startswith(f"{page.number:02}_"), page.path
        assert page.topic == TOPICS[page.number > 19], page.path
        assert page.question.endswith("?"), page.path
        assert page.printed.strip(), f"{page.path} does not say what its command printed"
        assert all(words for words in command_lines(page)), page.path


def test_a_page_is_read_with_its_parts(tmp_path: Path) -> None:
    page = page_of(tmp_path, PAGE)
    assert (page.number, page.question, page.claim, page.is_measured) == (7, "Why?", "It is so.", False)
    assert list(command_lines(page)) == [[sys.executable, "-m", "temper", "presets", "grpo"]]
    with pytest.raises(AssertionError, match="lacks its title, claim, command"):
        page_of(tmp_path, PAGE.replace("**In short.**", ""))


@pytest.mark.parametrize(
    ("output", "missing"),
    [
        ("│ gate │ clip(low=0.2) │\nmore\nloss -1.5e-3", None),
        ("gate clip(low=0.2)\nloss -1.51e-3", None),
        ("gate clip(low=0.2)\nloss -1.6e-3", "loss   -1.5e-3"),
        ("gate clip(low=0.2)\nloss 1.5e-3", "loss   -1.5e-3"),
        ("loss -1.5e-3\ngate clip(low=0.2)", "loss   -1.5e-3"),
        ("gate clip(high=0.2)\nloss -1.5e-3", "gate   clip(low=0.2)"),
        ("", "gate   clip(low=0.2)"),
    ],
)
def test_another_word_another_figure_and_another_order_are_seen(
    output: str, missing: str | None, tmp_path: Path
) -> None:
    assert missing_line(page_of(tmp_path, PAGE), output) == missing


def test_figures_of_one_machine_may_differ_and_words_may_not(tmp_path: Path) -> None:
    page = page_of(tmp_path, PAGE.replace("```text", "<!-- measured -->\n```text"))
    assert page.is_measured
    assert missing_line(page, "gate clip(low=0.9)\nloss 7") is None
    assert missing_line(page, "gate clip(low=0.9)\nloos 7") == "loss   -1.5e-3"


def test_an_unknown_question_and_a_recipe_that_is_not_there_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no question 99\. Use a number from 1 to"):
        find_page(PAGES, 99)
    page = replace(page_of(tmp_path, PAGE), command="temper train recipes/demo.toml --dry-run\n")
    require_clone(page, ROOT)
    with pytest.raises(UserError, match=r"needs recipes/demo.toml. Run it from the root of a clone"):
        require_clone(page, tmp_path)


@pytest.mark.heavy
def test_a_command_is_run_as_typed_and_its_failure_is_the_verbs(tmp_path: Path) -> None:
    def typed(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "110", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "temper", "guide", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment)

    shown = typed("4", "--run")
    page = find_page(PAGES, 4)
    assert shown.returncode == 0, shown.stderr
    assert missing_line(page, shown.stdout) is None, shown.stdout
    assert page.claim in shown.stdout
    assert "1" in typed().stdout
    assert typed("--run").returncode == 2
