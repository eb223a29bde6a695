"""Blocks of README and docs that are marked as runnable do run, from the root of a clone, in their order.

A mark is a comment on the line before a fence: `<!-- runnable -->`. A block with title="FILE" is saved as that file;
other `bash` and `python` blocks are run. `<!-- runnable heavy -->` is left to `make heavy`, where each line is typed
into a shell of its own as a reader would; the others run in this process, since importing torch takes seconds.
`needs PATH` names what a reader fetched before, e.g. a model; where it is not there, the block is skipped.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from temper.cli import app
from temper.config import load_recipe

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARK = re.compile(
    r"^<!-- runnable(?P<heavy> heavy)?(?: needs (?P<needs>\S+))? -->\n"
    r"```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
KNOWN = {"bash", "python", "toml", "json"}
CLONE = ("recipes", "examples", "temper", "models", "benchmarks", "README.md", "constraints.txt")
"""What a block may look at in a clone; it is not written to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One marked block of a page."""

    text: str
    language: str
    title: str
    """Of the file that it is saved as; empty: it is run."""
    is_heavy: bool
    needs: str
    """Path in the clone without which it cannot run; empty: none."""


def blocks_of(page: Path) -> list[Block]:
    return [
        Block(
            text=found["text"],
            language=found["language"],
            title=found["title"] or "",
            is_heavy=bool(found["heavy"]),
            needs=found["needs"] or "",
        )
        for found in MARK.finditer(page.read_text())
    ]


def commands(text: str) -> Iterator[str]:
    """Lines of a shell block, with those that go on joined; comments left out."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield line


def run_here(block: Block) -> None:
    """In this process, which has imported everything already."""
    if block.language == "python":
        exec(compile(block.text, "a block of the docs", "exec"), {"__name__": "__main__"})
        return
    for line in commands(block.text):
        words = shlex.split(line, comments=True)
        if words[0] == "temper":
            app(words[1:], standalone_mode=False)
        elif words[0] == "python":
            runpy.run_path(words[1], run_name="__main__")
        else:
            subprocess.run(["bash", "-ec", line], check=True, timeout=60)


def run_as_typed(block: Block, folder: Path) -> None:
    """In a shell in which `temper` and `python` are found, as in an active environment."""
    tools = folder / ".tools"
    tools.mkdir(exist_ok=True)
    for name, rest in (("temper", " -m temper"), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable}{rest} "$@"\n')
        (tools / name).chmod(0o755)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = ["bash", "-ec", block.text] if block.language == "bash" else [sys.executable, "-c", block.text]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{block.text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like the root of a clone, to be written into."""
    for name in CLONE:
        if (ROOT / name).exists():
            (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save(block: Block, clone: Path) -> None:
    (clone / block.title).parent.mkdir(parents=True, exist_ok=True)
    (clone / block.title).write_text(block.text)


MARKED = [page for page in PAGES if blocks_of(page)]
NAMES = [page.relative_to(ROOT).as_posix() for page in MARKED]


@pytest.mark.parametrize("page", MARKED, ids=NAMES)
def test_the_blocks_of_a_page_that_take_seconds_run_in_their_order(page: Path, clone: Path) -> None:
    for block in blocks_of(page):
        if block.title:
            save(block, clone)
        elif not block.is_heavy and (not block.needs or (clone / block.needs).exists()):
            run_here(block)


@pytest.mark.heavy
@pytest.mark.parametrize("page", MARKED, ids=NAMES)
def test_all_blocks_of_a_page_run_as_typed(page: Path, clone: Path) -> None:
    missing = sorted({block.needs for block in blocks_of(page) if block.needs and not (clone / block.needs).exists()})
    for block in blocks_of(page):
        if block.title:
            save(block, clone)
        elif block.needs not in missing:
            run_as_typed(block, clone)
    if missing:
        pytest.skip(f"the blocks that need {', '.join(missing)} were not run: fetch it first")


@pytest.mark.parametrize("page", MARKED, ids=NAMES)
def test_recipes_that_a_page_shows_as_files_are_accepted(page: Path, clone: Path) -> None:
    """Also where the model that they name is not there."""
    for block in blocks_of(page):
        if block.title:
            save(block, clone)
    for block in blocks_of(page):
        if block.title.endswith("recipe.toml"):  # a suite is a TOML file, too
            load_recipe(clone / block.title)


def test_every_mark_stands_before_a_block_that_can_be_run() -> None:
    for page in PAGES:
        text = page.read_text()
        blocks = blocks_of(page)
        assert len(re.findall(r"^<!-- runnable", text, re.MULTILINE)) == len(blocks), (
            f"{page.name}: a mark without block"
        )
        for block in blocks:
            assert block.language in KNOWN, f"{page.name}: {block.language}"
            assert block.title or block.language in ("bash", "python"), f"{page.name}: a block that nothing runs"


def test_every_tutorial_has_something_to_run() -> None:
    tutorials = [ROOT / "docs/index.md", *(ROOT / "docs/tutorials").glob("*.md")]
    assert len(tutorials) == 8
    assert [page.name for page in tutorials if page not in MARKED] == []


@pytest.mark.parametrize(
    ("language", "text"),
    [("bash", "temper train nowhere.toml"), ("bash", "test -e nowhere"), ("python", "raise RuntimeError"),
     ("bash", "temper no-such-verb")],
)  # fmt: skip
def test_a_block_that_fails_would_be_seen(language: str, text: str, clone: Path) -> None:
    block = Block(text=text, language=language, title="", is_heavy=False, needs="")
    with pytest.raises((Exception, SystemExit)):
        run_here(block)
    with pytest.raises(AssertionError):
        run_as_typed(block, clone)
