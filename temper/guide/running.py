"""Running the command of a page as a reader would type it, in processes of their own.

Owns: the command lines, and a deadline for all of a page. Refuses: anything in a block of `bash` but verbs of Temper.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from temper.errors import BackendError, UserError
from temper.guide.pages import GuidePage

PAGE_SECONDS = 300.0
"""That the command of a page may take in all, on two cores; most take a few."""
RECIPE = re.compile(r"recipes/[\w./]+")


def command_lines(page: GuidePage) -> Iterator[list[str]]:
    """What is to be started, word by word."""
    if page.language == "python":
        yield [sys.executable, "-c", page.command]
        return
    for line in page.command.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            assert words[0] == "temper", f"{page.path}: {line}"
            yield [sys.executable, "-m", "temper", *words[1:]]


def require_clone(page: GuidePage, folder: Path) -> None:
    """UserError when a command reads recipes and `folder` has none: an installed package comes without them."""
    missing = [recipe for recipe in RECIPE.findall(page.command) if not (folder / recipe).exists()]
    if missing:
        raise UserError(f"question {page.number} needs {missing[0]}. Run it from the root of a clone of Temper")


def run_page(page: GuidePage) -> None:
    """Runs the command in the current directory; what it prints goes straight to the terminal."""
    require_clone(page, Path.cwd())
    deadline = time.monotonic() + PAGE_SECONDS
    for words in command_lines(page):
        try:
            done = subprocess.run(words, check=False, timeout=deadline - time.monotonic())
        except subprocess.TimeoutExpired as error:
            raise BackendError(f"question {page.number}: no end after {PAGE_SECONDS:.0f} s") from error
        if done.returncode:
            raise BackendError(f"question {page.number}: its command ended with exit code {done.returncode}, see above")
