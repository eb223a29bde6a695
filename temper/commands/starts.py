"""Runs that fail before they begin leave nothing behind: the next try has the same name.

Owns: which runs have begun. Refuses: touching a folder that was there before, or one in which anything was recorded
that somebody may want to look at: a step, rollouts, an evaluation.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from temper.errors import TemperError
from temper.runs.reader import DATABASE, RunReader


@contextmanager
def undo_failed_start(folder: Path) -> Iterator[None]:
    """Removes the run directory when what runs inside makes it and then refuses before its first step."""
    was_there = folder.exists()
    try:
        yield
    except TemperError:
        with suppress(TemperError):  # a full disk may not even be read; what it refused is to be told, not that
            if not was_there and not has_begun(folder):
                shutil.rmtree(folder, ignore_errors=True)
        raise


def has_begun(folder: Path) -> bool:
    """Whether a run directory holds anything that was computed."""
    if any((folder / "checkpoints").glob("*/*")):
        return True
    if not (folder / DATABASE).is_file():
        return False
    with RunReader(folder) as reader:
        tables = ("steps", "groups", "evaluations")
        return any(reader.query(f"SELECT 1 FROM {table} LIMIT 1") for table in tables)
