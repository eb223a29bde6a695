"""The pages of the guide, one question each: algorithms/NN_name.md and infrastructure/NN_name.md.

Owns: how a page is read. Its first line is "# NUMBER. QUESTION"; the paragraph that begins with "**In short.**" is its
claim; its first block in `bash` or `python` is its command; the `text` block after that is what the command printed.
After the line "<!-- measured -->" figures of that block are those of one machine on one day; others must come again.
Refuses: running commands (running.py), drawing its picture (commands/pages/pictures.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from temper.errors import UserError

FOLDER = Path(__file__).parent
TOPICS = ("algorithms", "infrastructure")
TITLE = re.compile(r"# (\d+)\. (.+)\n")
CLAIM = re.compile(r"^\*\*In short\.\*\* (.+?)\n\n", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^```(bash|python)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^(<!-- measured -->\n)?```text\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r"!\[([^\]]+)\]\((?:\.\./)*([^)]+)\)")
NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")
TOLERANCE = 0.02
"""Relative difference up to which a figure has come again: rounding is not the same on every machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidePage:
    """One question, its answer and what shows it."""

    number: int
    question: str
    claim: str
    topic: str
    path: Path
    text: str
    language: str
    """Of the command: "bash", lines that begin with `temper`, or "python"."""
    command: str
    printed: str
    is_measured: bool
    """Whether its figures are of one machine and may be others elsewhere."""


def read_pages() -> list[GuidePage]:
    """All pages, by number."""
    paths = [path for topic in TOPICS for path in (FOLDER / topic).glob("*.md")]
    return sorted((read_page(path) for path in paths), key=lambda page: page.number)


def read_page(path: Path) -> GuidePage:
    text = path.read_text()
    title, claim, command = TITLE.match(text), CLAIM.search(text), COMMAND.search(text)
    printed = PRINTED.search(text, command.end()) if command else None
    if not (title and claim and command and printed):
        raise AssertionError(f"{path} lacks its title, claim, command or what that printed")
    return GuidePage(
        number=int(title[1]),
        question=title[2],
        claim=" ".join(claim[1].split()),
        topic=path.parent.name,
        path=path,
        text=text,
        language=command[1],
        command=command[2],
        printed=printed[2],
        is_measured=printed[1] is not None,
    )


def find_page(pages: Sequence[GuidePage], number: int) -> GuidePage:
    for page in pages:
        if page.number == number:
            return page
    raise UserError(
        f"the guide has no question {number}. Use a number from 1 to {max(page.number for page in pages)}; "
        '"temper guide" lists them'
    )


def terminal_text(page: GuidePage) -> str:
    """Its Markdown, with the place of each picture where a browser would show the picture."""
    return PICTURE.sub(r"Picture: \1 (\2).", page.text)


def missing_line(page: GuidePage, output: str) -> str | None:
    """The first line of what a page says was printed that `output` lacks, in that order; None: all came again.

    Spaces and the frames of tables do not count. A line "..." stands for whatever was printed there.
    """
    lines = iter([_plain(line) for line in output.splitlines()])
    for wanted in page.printed.splitlines():
        plain = _plain(wanted)
        if plain in ("", "..."):
            continue
        if not any(_is_same(plain, line, figures_count=not page.is_measured) for line in lines):
            return wanted
    return None


def _plain(line: str) -> str:
    return " ".join(re.sub(r"[\u2500-\u257f]", " ", line).split())


def _is_same(one: str, other: str, *, figures_count: bool) -> bool:
    if NUMBER.sub("#", one) != NUMBER.sub("#", other):
        return False
    if not figures_count:
        return True
    pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
    return all(_is_close(_value(a), _value(b)) for a, b in pairs)


def _value(text: str) -> float:
    return float(text.replace(",", ""))


def _is_close(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE * max(abs(one), abs(other))
