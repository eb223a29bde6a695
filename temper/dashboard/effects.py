"""What tools did to the world, described without doing it, or were refused, episode by episode.

Owns: the statement behind that list. Refuses: events without consequences, which stand with their episode (tokens.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from temper.dashboard import queries
from temper.dashboard.database import Database, OutOfTime, Value, reading

Outcome = Literal["carried out", "described", "denied"]
KINDS: dict[str, Outcome] = {"side_effect": "carried out", "described": "described", "denied": "denied"}
"""By kind of event. "carried out" may have failed or been cut off, as its detail says: it was begun."""
COLUMNS = ("stage", "step", "group_id", "member", "task_id", "turn", "tool", "detail", "outcome")
SHOWN_DETAIL = 2000
"""Characters of a call in the list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectFilter:
    """Which calls to list. None: all."""

    tool: str | None = None
    """Part of its name."""
    outcome: Outcome | None = None


def list_effects(folder: Path, wanted: EffectFilter, offset: int, limit: int) -> dict[str, Any]:
    """Newest step first, each step in draw order, each episode in its own; `more`: whether there are others, or None
    where time ran out before that was known."""
    found: list[dict[str, Any]] = []
    with reading(folder) as database:
        try:
            for place, row in enumerate(_matching(database, wanted)):
                if place >= offset + limit:
                    return {"rows": found, "more": True}
                if place >= offset:
                    shown = dict(zip(COLUMNS, row, strict=True))
                    found.append({**shown, "outcome": KINDS[shown["outcome"]]})
        except OutOfTime:
            return {"rows": found, "more": None}
    return {"rows": found, "more": False}


def _matching(database: Database, wanted: EffectFilter) -> Any:
    """Step by step from the newest: nobody waits for steps that are never shown."""
    kinds = [kind for kind, outcome in KINDS.items() if wanted.outcome in (None, outcome)]
    condition, values = f"json_extract(e.value, '$.kind') IN ({', '.join('?' * len(kinds))})", list[Value](kinds)
    if wanted.tool:
        condition += " AND json_extract(e.value, '$.name') LIKE ? ESCAPE '\\'"
        values.append(queries.like_pattern(wanted.tool))
    for stage in reversed(queries.stages(database)):
        yield from database.iterate(
            "SELECT t.stage, t.step, t.group_id, t.member, g.task_id, json_extract(e.value, '$.turn'), "
            f"json_extract(e.value, '$.name'), substr(json_extract(e.value, '$.detail'), 1, {SHOWN_DETAIL}), "
            "json_extract(e.value, '$.kind') FROM trajectories t "
            "CROSS JOIN groups g ON g.stage = t.stage AND g.step = t.step AND g.group_id = t.group_id "
            f"CROSS JOIN json_each(t.events) e WHERE t.stage = ? AND t.events IS NOT NULL AND {condition} "
            "ORDER BY t.step DESC, g.draw, t.member, e.key",
            stage["stage"],
            *values,
        )
