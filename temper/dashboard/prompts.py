"""Histories of prompts, for the page of data: a table, and how pass rates spread over the steps.

Owns: their statements, the bands of pass rates. Refuses: judging; a prompt stands here as its run remembers it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from temper.dashboard.database import Database, Value, reading
from temper.dashboard.queries import SHOWN_TEXT, like_pattern
from temper.dashboard.series import Point, together

BANDS = ("never solved", "up to 25%", "25 to 75%", "75% and more", "always solved")
"""By running pass rate; both ends of the third belong to its neighbours."""
ORDERS = {
    "task": "task_id", "source": "source", "rate": "rate", "draws": "draws", "attempts": "attempts", "step": "step",
}  # fmt: skip
"""Columns that the table can be sorted by."""
LATEST = (
    "WITH latest AS (SELECT stage, task_id, MAX(step) AS step, source, draws, attempts, passed, rate FROM prompts "
    "GROUP BY stage, task_id)"  # of each group SQLite gives the row with the largest step
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFilter:
    """Which prompts to list, and in which order."""

    q: str | None = None
    """Part of the name of a task or source, or of what was asked."""
    sort: str = "rate"
    """A key of ORDERS, with a minus before it for the highest first."""


def list_prompts(folder: Path, wanted: PromptFilter, offset: int, limit: int) -> dict[str, Any]:
    """Prompts as they stand, how many fit, and how many there are."""
    condition, values = _condition(wanted.q)
    column = ORDERS.get(wanted.sort.removeprefix("-"), "rate")
    way = "DESC" if wanted.sort.startswith("-") else "ASC"
    with reading(folder) as database:
        every = database.rows(f"{LATEST} SELECT COUNT(*) FROM latest")[0][0]
        fitting = database.rows(f"{LATEST} SELECT COUNT(*) FROM latest WHERE {condition}", *values)[0][0]
        found = database.records(
            f"{LATEST} SELECT * FROM latest WHERE {condition} "
            f"ORDER BY {column} IS NULL, {column} {way}, stage, task_id LIMIT ? OFFSET ?",
            *(*values, limit, offset),
        )
        return {"rows": [_with_words(database, row) for row in found], "total": fitting, "every": every}


def _condition(q: str | None) -> tuple[str, list[Value]]:
    if not q:
        return "1", []
    # Prompts are stored as JSON, where a quotation mark is written with a backslash.
    inside = like_pattern(json.dumps(q, ensure_ascii=False)[1:-1])
    asked = (
        "EXISTS (SELECT 1 FROM groups g WHERE g.stage = latest.stage AND g.step = latest.step "
        "AND g.task_id = latest.task_id AND g.prompt LIKE ? ESCAPE '\\')"
    )
    named = " OR ".join(f"{column} LIKE ? ESCAPE '\\'" for column in ("task_id", "source"))
    return f"({named} OR {asked})", [like_pattern(q), like_pattern(q), inside]


def _with_words(database: Database, row: dict[str, Any]) -> dict[str, Any]:
    """`prompt`: the last thing that was asked; `group_id`: of its newest group."""
    groups = database.rows(
        "SELECT group_id, prompt FROM groups WHERE stage = ? AND step = ? AND task_id = ? ORDER BY draw DESC LIMIT 1",
        *(row["stage"], row["step"], row["task_id"]),
    )
    group_id, prompt = groups[0] if groups else (None, "[]")
    messages = json.loads(prompt)
    return {**row, "group_id": group_id, "prompt": str(messages[-1]["content"])[:SHOWN_TEXT] if messages else ""}


def spread(database: Database) -> dict[str, list[dict[str, Any]]]:
    """By band: which share of the prompts that a stage had seen by a step had a running pass rate there."""
    rows = database.iterate(
        "SELECT stage, step, task_id, rate FROM prompts WHERE rate IS NOT NULL ORDER BY stage, step"
    )
    return together(spread_of(rows))


def spread_of(rows: Iterable[tuple[int, int, str, float]]) -> dict[str, list[Point]]:
    """Rows in the order of stages and steps. Empty without any."""
    points: dict[str, list[Point]] = {}
    place: tuple[int, int] | None = None
    bands: dict[str, str] = {}
    counts: Counter[str] = Counter()

    def note() -> None:
        if place is not None:
            for name in BANDS:
                points.setdefault(name, []).append((*place, counts[name] / counts.total()))

    for stage, step, task_id, rate in rows:
        if place != (stage, step):
            note()
            if place is None or place[0] != stage:  # a stage begins without histories
                bands, counts = {}, Counter()
            place = (stage, step)
        counts.subtract([bands[task_id]] if task_id in bands else [])
        bands[task_id] = band_of(rate)
        counts[bands[task_id]] += 1
    note()
    return points


def band_of(rate: float) -> str:
    if rate <= 0.0 or rate >= 1.0:
        return BANDS[0] if rate <= 0.0 else BANDS[4]
    return BANDS[1] if rate <= 0.25 else BANDS[2] if rate < 0.75 else BANDS[3]
