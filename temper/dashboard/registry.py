"""Which runs there are. Owns: ids, the folders behind them, runs that come and go while they are served.

Refuses: paths from clients. A client knows ids; only folders found under those the user named have one.
"""

from __future__ import annotations

import hashlib
import math
import os
import sqlite3
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from temper.dashboard import queries, recipes
from temper.dashboard.database import DATABASE, OutOfTime, reading
from temper.errors import UserError

SCAN_EVERY_SECONDS = 2.0
DEPTH = 3
"""Folders below the named one in which runs are looked for."""
OWN_FOLDERS = {"checkpoints", "model"}
"""Folders inside a run that are not searched: there are no runs in them, but thousands of files."""


class UnknownRun(Exception):
    """An id that stands for no run, or for one that is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRun:
    id: str
    name: str
    folder: Path


class Registry:
    """The runs below the folders that were named."""

    def __init__(self, roots: Sequence[Path]) -> None:
        for root in roots:
            if not root.is_dir():
                raise UserError(f"{root} is not a directory. Give a run directory, or a folder of runs such as runs/")
        self._roots = [root.resolve() for root in roots]
        self._runs: dict[str, KnownRun] = {}
        self._scanned = -math.inf
        self._lock = threading.Lock()

    def runs(self) -> list[KnownRun]:
        """What there is now, by name."""
        with self._lock:
            if time.monotonic() - self._scanned >= SCAN_EVERY_SECONDS:
                self._scan()
            return list(self._runs.values())

    def find(self, run_id: str) -> KnownRun:
        run = next((run for run in self.runs() if run.id == run_id), None)
        if run is None:
            raise UnknownRun(f"there is no run {run_id[:40]!r} here")
        return run

    def _scan(self) -> None:
        found: dict[str, KnownRun] = {}
        for root in self._roots:
            for folder in find_runs(root):
                run_id = hashlib.sha256(str(folder).encode("utf-8", "surrogateescape")).hexdigest()[:12]
                name = folder.name if folder == root else folder.relative_to(root).as_posix()
                found.setdefault(run_id, KnownRun(id=run_id, name=name, folder=folder))
        self._runs = dict(sorted(found.items(), key=lambda item: (item[1].name, item[0])))
        self._scanned = time.monotonic()


def find_runs(root: Path, depth: int = DEPTH) -> list[Path]:
    """Folders with a run.db, the named one included. Links are not followed out of it."""
    if (root / DATABASE).is_file():
        return [root]
    if depth == 0:
        return []
    try:
        with os.scandir(root) as entries:
            inner = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []
    return [
        run
        for name in inner
        if not name.startswith(".") and name not in OWN_FOLDERS
        for run in find_runs(root / name, depth - 1)
    ]


def summary(run: KnownRun) -> dict[str, Any]:
    """One line of the list of runs. A run that cannot be read is listed with what is wrong with it.

    `seeds` is equal for runs whose recipes differ in their seed alone."""
    about: dict[str, Any] = {
        "id": run.id, "name": run.name, "folder": str(run.folder), "state": "not finished", "ended": "", "stages": [],
        "last_stage": None, "last_step": None, "updated": _updated(run.folder), "error": None,
        "seeds": recipes.seed_group(recipes.recipe_stages(run.folder)),
    }  # fmt: skip
    try:
        with reading(run.folder) as database:
            state = queries.run_state(database)
            about["state"], about["ended"] = state.name, state.text
            about["stages"] = queries.stages(database)
            about["last_stage"], about["last_step"] = queries.last_step(database)
    except (UserError, sqlite3.Error, OutOfTime) as error:
        about["error"] = str(error)
    return about


def _updated(folder: Path) -> float | None:
    """When the run last wrote. An empty log was made by a reader, or by a run that closed."""
    times = []
    for name in (DATABASE, f"{DATABASE}-wal"):
        try:
            facts = (folder / name).stat()
        except OSError:  # it is not there, or not any more
            continue
        times += [facts.st_mtime] if facts.st_size else []
    return max(times, default=None)
