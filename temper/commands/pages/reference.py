"""Every page of docs/ that is written from the code, by its path below docs/.

Owns: the list. Refuses: importing what two of the pages are about, the command line and the package's door: both stand
above, and are handed over.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from temper.commands.pages import metrics, objectives, recipe
from temper.commands.pages.catalogue import environments_text, rewards_text
from temper.commands.pages.command_line import command_line_text
from temper.commands.pages.guide import guide_text
from temper.commands.pages.presets import presets_text
from temper.commands.pages.python import python_text
from temper.commands.pages.troubleshooting import troubleshooting_text

REFERENCE: dict[str, Callable[[], str]] = {
    "reference/presets.md": presets_text,
    "reference/rewards.md": rewards_text,
    "reference/environments.md": environments_text,
    "guide.md": guide_text,
    "troubleshooting.md": troubleshooting_text,
}


def reference_texts(command: Any, package: ModuleType) -> dict[str, str]:
    """`command`: the group of verbs as click has it; `package`: what a user imports."""
    texts = {path: text() for path, text in REFERENCE.items()}
    return texts | {"reference/cli.md": command_line_text(command), "reference/python.md": python_text(package)}


def write_pages(folder: Path, command: Any, package: ModuleType) -> list[Path]:
    """Writes all of them and returns their paths."""
    written = [page.write_page(folder) for page in (metrics, objectives, recipe)]
    for path, text in reference_texts(command, package).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
        written.append(folder / path)
    return written
