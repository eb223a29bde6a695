"""All runs in one table: how each stands, what it reached, and in what its recipe differs from the others'.

Owns: the rows of that table. Refuses: failing as a whole; a run that cannot be read is a row that says so.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from temper.dashboard import queries, recipes
from temper.dashboard.database import Database, OutOfTime, reading, signature
from temper.dashboard.registry import KnownRun, summary
from temper.errors import UserError
from temper.runs.notes import read_notes

END = ("score", "low", "high", "stage", "step")


def table(runs: Sequence[KnownRun], *, can_edit: bool) -> dict[str, Any]:
    stages = {run.id: recipes.recipe_stages(run.folder) for run in runs}
    keys, values = recipes.differing(stages)
    rows = [{**summary(run), **_reached(run.folder), **notes_of(run.folder), "recipe": values[run.id]} for run in runs]
    return {"runs": rows, "differing": keys, "can_edit": can_edit}


def notes_of(folder: Path) -> dict[str, Any]:
    """Tags and note of a run; `notes_error` says why they cannot be read."""
    try:
        notes = read_notes(folder)
    except UserError as error:
        return {"tags": [], "note": "", "notes_error": str(error)}
    return {"tags": list(notes.tags), "note": notes.note, "notes_error": None}


def _reached(folder: Path) -> dict[str, Any]:
    try:
        return _read(folder, signature(folder))
    except (OSError, UserError, sqlite3.Error, OutOfTime):
        return {"score": None, "reward": None, "alarms": {}, "steps_done": 0, "drawn": 0, "trained": 0, "seconds": 0.0}


@lru_cache(maxsize=512)
def _read(folder: Path, written: tuple[Any, ...]) -> dict[str, Any]:
    """Kept until the run writes again."""
    with reading(folder) as database:
        steps, drawn, trained, seconds = queries.totals(database)
        first, last = queries.ends(database, "reward/mean")
        return {
            "score": _score(database, folder),
            "reward": None if last is None else {"first": first, "last": last},
            "alarms": queries.alarm_levels(database),
            "steps_done": steps,
            "drawn": drawn,
            "trained": trained,
            "seconds": seconds,
        }


def _score(database: Database, folder: Path) -> dict[str, Any] | None:
    """First and last held-out score of the name that comes first; None without any. A stage that starts elsewhere than
    where the one before ended is not part of what the others made. `differs`: parts of the budget that are not equal,
    with which the two do not compare."""
    starts = [str(stage.get("model", {}).get("path", "")) for stage in recipes.recipe_stages(folder)]
    line = next((place for place, path in enumerate(starts) if place and path.startswith("stage:")), len(starts))
    found = [row for row in queries.evaluations(database) if row["stage"] < line or not starts]
    named = [row for row in found if row["name"] == found[0]["name"] and row["score"] is not None]
    if not named:
        return None
    first, last = named[0], named[-1]
    budgets = first["budget"], last["budget"]
    differs = [key for key in sorted({*budgets[0], *budgets[1]}) if budgets[0].get(key) != budgets[1].get(key)]
    ends = {name: {key: row[key] for key in END} for name, row in (("first", first), ("last", last))}
    return {"name": first["name"], **ends, "differs": differs, "constant": last["constant_score"]}
