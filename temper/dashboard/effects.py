"""What tools did to the world, described without doing it, or were refused, episode by episode, in training and in
evaluations.

Owns: the statements behind that list. Refuses: events without consequences, which stand with their episode (tokens.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from temper.dashboard import queries
from temper.dashboard.database import Database, OutOfTime, Value, reading

Outcome = Literal["carried out", "described", "denied"]
KINDS: dict[str, Outcome] = {"side_effect": "carried out", "described": "described", "denied": "denied"}
"""By kind of event. "carried out" may have failed or been cut off, as its detail says: it was begun."""
COLUMNS = ("stage", "step", "evaluation", "group_id", "member", "task_id", "turn", "tool", "detail", "outcome")
"""evaluation: its name; None for an episode of training. group_id: of that; None for one of an evaluation."""
SHOWN_DETAIL = 2000
"""Characters of a call in the list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectFilter:
    """Which calls to list. None: all."""

    tool: str | None = None
    """Part of its name."""
    outcome: Outcome | None = None


def list_effects(folder: Path, wanted: EffectFilter, offset: int, limit: int) -> dict[str, Any]:
    """Newest step first, in it evaluations and then training in draw order, each episode in its own order; `more`:
    whether there are others, or None where time ran out before that was known."""
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


def _matching(database: Database, wanted: EffectFilter) -> Iterator[Any]:
    """Step by step from the newest: nobody waits for steps that are never shown."""
    for stage in reversed(queries.stages(database)):
        number = stage["stage"]
        yield from heapq.merge(
            _of_evaluations(database, wanted, number), _of_training(database, wanted, number), key=lambda row: -row[1]
        )


def _of_training(database: Database, wanted: EffectFilter, stage: int) -> Iterator[Any]:
    kind, name = "json_extract(e.value, '$.kind')", "json_extract(e.value, '$.name')"
    condition, values = _condition(wanted, kind, name)
    return database.iterate(
        "SELECT t.stage, t.step, NULL, t.group_id, t.member, g.task_id, json_extract(e.value, '$.turn'), "
        f"{name}, substr(json_extract(e.value, '$.detail'), 1, {SHOWN_DETAIL}), {kind} FROM trajectories t "
        "CROSS JOIN groups g ON g.stage = t.stage AND g.step = t.step AND g.group_id = t.group_id "
        f"CROSS JOIN json_each(t.events) e WHERE t.stage = ? AND t.events IS NOT NULL AND {condition} "
        "ORDER BY t.step DESC, g.draw, t.member, e.key",
        stage,
        *values,
    )


def _of_evaluations(database: Database, wanted: EffectFilter, stage: int) -> Iterator[Any]:
    condition, values = _condition(wanted, "kind", "name")
    return database.iterate(
        "SELECT stage, step, evaluation, NULL, member, task_id, turn, name, "
        f"substr(detail, 1, {SHOWN_DETAIL}), kind FROM heldout_effects WHERE stage = ? AND {condition} "
        "ORDER BY step DESC, evaluation, place",
        stage,
        *values,
    )


def _condition(wanted: EffectFilter, kind: str, name: str) -> tuple[str, list[Value]]:
    """kind, name: the columns that hold them."""
    kinds = [known for known, outcome in KINDS.items() if wanted.outcome in (None, outcome)]
    condition, values = f"{kind} IN ({', '.join('?' * len(kinds))})", list[Value](kinds)
    if wanted.tool:
        condition += f" AND {name} LIKE ? ESCAPE '\\'"
        values.append(queries.like_pattern(wanted.tool))
    return condition, values
