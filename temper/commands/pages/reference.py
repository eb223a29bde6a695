"""Every page of docs/ that is written from the code, by its path below docs/.

Owns: the list. Refuses: the command line's own page needs the application, which stands above: it is handed over.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from temper.commands.pages import metrics, objectives, recipe
from temper.commands.pages.catalogue import environments_text, rewards_text
from temper.commands.pages.command_line import command_line_text
from temper.commands.pages.presets import presets_text
from temper.commands.pages.python import python_text

REFERENCE: dict[str, Callable[[], str]] = {
    "reference/presets.md": presets_text,
    "reference/rewards.md": rewards_text,
    "reference/environments.md": environments_text,
    "reference/python.md": python_text,
}


def write_pages(folder: Path, command: Any) -> list[Path]:
    """Writes all of them; `command` is the group of verbs as click has it."""
    written = [page.write_page(folder) for page in (metrics, objectives, recipe)]
    texts = {path: text() for path, text in REFERENCE.items()} | {"reference/cli.md": command_line_text(command)}
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
        written.append(folder / path)
    return written
