"""What mkdocs asks when it builds the site from docs/ (mkdocs.yml names this file).

Owns: pages for what docs/ links to outside of itself (code, recipes, README): each becomes a page below source/, so
that the site needs neither an address of the repository nor a network; and blank lines before lists and tables, which
a forge does not need and mkdocs does. Refuses: changing a source; docs/ reads the same without the site.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
SOURCE = "source"
"""Folder of the site with the pages of files outside of docs/."""
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".jsonl": "json", ".sh": "bash"}
FENCE = re.compile(r"^\s*(```+|~~~+)")
BLOCK = re.compile(r"^(?:[-*] |\d+\. |\|)")
"""How a list or a table begins."""
HIDDEN = "---\nsearch:\n  exclude: true\n---\n"
"""Pages of source/ are not searched: whoever searches wants the text about the code."""


def on_files(files: Files, *, config: Any) -> Files:
    """Adds a page for everything outside of docs/ that some page links to, and for what those link to."""
    pages = files.documentation_pages()
    waiting = [target for file in pages for target in _outside(file.content_string, _home(file))]
    made: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in made:
            continue
        made.add(path)
        text = copy_of(path)
        files.append(File.generated(config, f"{SOURCE}/{path}.md", content=text))
        waiting += _outside(text, PurePosixPath(path))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    return space_blocks(lead_into_site(markdown, _home(page.file), page.file.src_uri))


def copy_of(path: str) -> str:
    """The page of a file or folder of the repository: Markdown as it is, a folder as a list, the rest as a block."""
    place = ROOT / path
    if place.is_dir():
        kept = sorted(one.name for one in place.iterdir() if one.is_file() and not one.name.startswith("."))
        listed = "\n".join(f"- [{name}]({place.name}/{name})" for name in kept)
        return f"{HIDDEN}# {path}/\n\n{listed}\n"
    text = place.read_text()
    if place.suffix == ".md":
        return text
    return f"{HIDDEN}# {path}\n\n~~~~~~{LANGUAGES.get(place.suffix, 'text')}\n{text}~~~~~~\n"


def lead_into_site(markdown: str, home: PurePosixPath, page: str) -> str:
    """Links of a file of the repository as links of a page of the site; what leads nowhere stays, for strict to find.

    `home` is the file's path in the repository, `page` the page's in the site.
    """

    def lead(found: re.Match[str]) -> str:
        target = _target(found[2], home)
        if target is None:
            return found[0]
        inside = target.removeprefix("docs/") if target.startswith("docs/") else f"{SOURCE}/{target}.md"
        return found[1] + os.path.relpath(inside, PurePosixPath(page).parent) + found[3]

    return "\n".join(LINK.sub(lead, line) if is_text else line for line, is_text in _lines(markdown))


def space_blocks(markdown: str) -> str:
    """A blank line before every list and table that follows a paragraph."""
    spaced: list[str] = []
    for line, is_text in _lines(markdown):
        before = spaced[-1] if spaced else ""
        continues = not before.strip() or before.startswith(" ") or BLOCK.match(before)
        if is_text and BLOCK.match(line) and not continues and not _is_inside_item(spaced):
            spaced.append("")
        spaced.append(line)
    return "\n".join(spaced)


def _is_inside_item(lines: list[str]) -> bool:
    """Whether the paragraph that ends here began as an item of a list: its next item needs no blank line."""
    for line in reversed(lines):
        if not line.strip():
            return False
        if BLOCK.match(line):
            return True
    return False


def _lines(markdown: str) -> Iterator[tuple[str, bool]]:
    """Every line, and whether it is text and not code."""
    fence = ""
    for line in markdown.split("\n"):
        mark = FENCE.match(line)
        yield line, not fence and not mark
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence) and line.strip() == mark[1]:
            fence = ""


def _outside(markdown: str, home: PurePosixPath) -> list[str]:
    """Files and folders outside of docs/ that a file of the repository links to."""
    links = [found[2] for line, is_text in _lines(markdown) if is_text for found in LINK.finditer(line)]
    return [target for link in links if (target := _target(link, home)) and not target.startswith("docs/")]


def _target(link: str, home: PurePosixPath) -> str | None:
    """Path in the repository that a link leads to; None: another host, or nothing that is there."""
    if "://" in link or link.startswith(("mailto:", "/")):
        return None
    target = os.path.normpath(home.parent / link)
    return target if not target.startswith("..") and (ROOT / target).exists() else None


def _home(file: File) -> PurePosixPath:
    """Where in the repository the text of a page stands."""
    if file.src_uri.startswith(f"{SOURCE}/"):
        return PurePosixPath(file.src_uri.removeprefix(f"{SOURCE}/").removesuffix(".md"))
    return PurePosixPath("docs") / file.src_uri
