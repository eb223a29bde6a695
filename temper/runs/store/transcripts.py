"""What rollouts said, token by token, kept for the newest steps: all of it would fill a disk.

Owns: how much of run.db transcripts take, and which go: whole steps, oldest first; the newest always stays. A rollout
without one keeps its score, parts, status and length, and what it did to the world or was refused (types.LASTING); the
ledger of what was trained is always whole.
"""

from __future__ import annotations

import json
import sqlite3

from temper.runs.store.arrays import ARRAY_TYPES
from temper.storable import to_json
from temper.types import LASTING

TEXTS = ("text", "messages", "events")
"""Columns of a rollout that go with its tokens."""


def limit_transcripts(connection: sqlite3.Connection, stage: int, step: int, limit_bytes: float) -> None:
    """Call it when the rollouts of a step are written: notes what they take, and makes room for them.

    A function of the steps recorded so far: a run that was killed and resumed ends with the same transcripts.
    """
    size = _size(connection, "token_rows", tuple(ARRAY_TYPES), stage, step)
    size += _size(connection, "trajectories", TEXTS, stage, step)
    if size:
        connection.execute("INSERT OR REPLACE INTO transcripts VALUES (?, ?, ?)", (stage, step, size))
    newest = connection.execute("SELECT stage, step, bytes FROM transcripts ORDER BY stage DESC, step DESC").fetchall()
    total = 0
    for place, (kept_stage, kept_step, taken) in enumerate(newest):
        total += taken
        if place > 0 and total > limit_bytes:
            _drop(connection, kept_stage, kept_step)


def _size(connection: sqlite3.Connection, table: str, columns: tuple[str, ...], stage: int, step: int) -> int:
    sizes = " + ".join(f"COALESCE(LENGTH(CAST({name} AS BLOB)), 0)" for name in columns)
    query = f"SELECT COALESCE(SUM({sizes}), 0) FROM {table} WHERE stage = ? AND step = ?"
    return int(connection.execute(query, (stage, step)).fetchone()[0])


def _drop(connection: sqlite3.Connection, stage: int, step: int) -> None:
    """SQLite writes the next steps where these were: the file grows no further, but for what was done to the world."""
    happened = connection.execute(
        "SELECT group_id, member, events FROM trajectories WHERE stage = ? AND step = ? AND events IS NOT NULL",
        (stage, step),
    ).fetchall()
    nothing = ", ".join(f"{name} = NULL" for name in TEXTS)
    connection.execute("DELETE FROM token_rows WHERE stage = ? AND step = ?", (stage, step))
    connection.execute(f"UPDATE trajectories SET {nothing} WHERE stage = ? AND step = ?", (stage, step))
    connection.execute("DELETE FROM transcripts WHERE stage = ? AND step = ?", (stage, step))
    connection.executemany(
        "UPDATE trajectories SET events = ? WHERE stage = ? AND step = ? AND group_id = ? AND member = ?",
        [(kept, stage, step, *name) for *name, events in happened if (kept := _lasting(events)) is not None],
    )


def _lasting(events: str) -> str | None:
    kept = [event for event in json.loads(events) if event["kind"] in LASTING]
    return to_json(kept) if kept else None
