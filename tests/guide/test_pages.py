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
from temper.commands.judging import verify
from temper.commands.pages.pictures import PICTURES, draw_page, draw_picture, run_python
from temper.errors import BackendError, UserError
from temper.guide import running
from temper.guide.pages import (
    NUMBER,
    PICTURE,
    TOPICS,
    GuidePage,
    find_page,
    missing_line,
    read_page,
    read_pages,
    terminal_text,
)
from temper.guide.running import PAGE_SECONDS, command_lines, require_clone, run_page
from temper.rewards.golden.golden_rows import GoldenRow

ROOT = Path(__file__).parents[2]
PAGES = read_pages()
HEAVY = {3, 9, 12, 23, 25, 27, 28}
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


def run_here(page: GuidePage) -> tuple[str, dict[str, object]]:
    """What it prints and what its Python leaves behind, in this process: importing torch anew for each page would take
    minutes."""
    if page.language == "python":
        names, printed = run_python(page)
        return printed, names
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        for words in command_lines(page):
            code = app(words[3:], standalone_mode=False)
            assert not code, f"{words[3:]} ended with exit code {code}"
    return output.getvalue(), {}


def seconds_of_work() -> float:
    """Of this process and of those it started: a crowded machine takes longer and does not work more."""
    return sum(os.times()[:4])


def params() -> list[object]:
    heavy = pytest.mark.heavy
    return [pytest.param(page, id=page.path.stem, marks=[heavy] * (page.number in HEAVY)) for page in PAGES]


@pytest.mark.parametrize("page", params())
def test_a_page_prints_again_what_it_says_it_printed(
    page: GuidePage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(out, "_width", 110)  # made already, with the width of whatever terminal this is
    before = seconds_of_work()
    output, names = run_here(page)
    shown = output + capsys.readouterr().out
    assert missing_line(page, shown) is None, shown
    assert seconds_of_work() - before < PAGE_SECONDS
    if page.number in PICTURES:
        picture = f"docs/guide/{page.path.stem}.svg"
        assert (ROOT / picture).is_file(), f"run: temper guide {page.number} --picture {picture}"
        assert is_drawn_again((ROOT / picture).read_text(), draw_picture(page.number, names)), f"{picture} is old"


def is_drawn_again(one: str, other: str) -> bool:
    """Whether lines are where they were, to a pixel: rounding is not the same on every machine."""
    places = [list(map(float, NUMBER.findall(text.replace(",", " ")))) for text in (one, other)]
    return NUMBER.sub("#", one) == NUMBER.sub("#", other) and places[0] == pytest.approx(places[1], abs=1.0)


def test_pictures_are_small_and_shown_by_pages_that_a_terminal_can_print() -> None:
    shown = {path for page in PAGES for _, path in PICTURE.findall(page.text)}
    assert {f"docs/guide/{page.path.stem}.svg" for page in PAGES if page.number in PICTURES} <= shown
    assert [path for path in shown if not (ROOT / path).is_file()] == []
    own = {str(path.relative_to(ROOT)): path.stat().st_size for path in (ROOT / "docs" / "guide").iterdir()}
    assert set(own) <= shown
    assert max(own.values()) < 40_000
    page = find_page(PAGES, 6)
    assert "![" in page.text
    assert "![" not in terminal_text(page)
    assert "(docs/guide/06_exploration.svg)" in terminal_text(page)


def test_a_picture_that_has_moved_is_seen() -> None:
    drawn = '<path d="M52.0,30.0L380.5,226.0" stroke="#1f6feb"/>'
    assert is_drawn_again(drawn, drawn.replace("226.0", "226.4"))
    assert not is_drawn_again(drawn, drawn.replace("226.0", "229.0"))
    assert not is_drawn_again(drawn, drawn.replace("stroke", "fill"))


def test_a_page_without_a_picture_says_which_have_one() -> None:
    with pytest.raises(UserError, match=r"question 1 draws no picture\. Use one of 6, 15"):
        draw_page(find_page(PAGES, 1))


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


def test_a_page_in_python_that_reads_a_recipe_says_so_too(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"question 23 needs recipes/demo.toml"):
        require_clone(find_page(PAGES, 23), tmp_path)


def test_a_page_that_fails_or_takes_longer_than_it_may_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = replace(page_of(tmp_path, PAGE), language="python", command="raise SystemExit(3)")
    with pytest.raises(BackendError, match="question 7: its command ended with exit code 3"):
        run_page(page)
    monkeypatch.setattr(running, "PAGE_SECONDS", 0.5)
    with pytest.raises(BackendError, match="question 7: no end after 0 s"):
        run_page(replace(page, command="import time; time.sleep(60)"))


def test_an_attack_that_scores_fails_the_page_that_says_none_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scoring = GoldenRow(id="attacks:1", response="56", is_correct=False, answer="56")
    monkeypatch.setattr(verify, "load_attacks", lambda kind: [scoring])
    page = replace(page_of(tmp_path, PAGE), command="temper verify exact --attack\n")
    with pytest.raises(AssertionError, match="ended with exit code 1"):
        run_here(page)
    attacked = find_page(PAGES, 3)
    assert not attacked.is_measured
    assert missing_line(attacked, attacked.printed.replace("scored: 0", "scored: 12")) == "scored: 0. None may."


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
