"""What the pages ask of a run, as SQL over its indexes. Owns: every statement but those about histories of prompts
(prompts.py). Refuses: writing, and scans without end.

The largest tables are read by their keys (stage, step, group_id, member); whole tables only under a deadline.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from temper.dashboard.database import Database, OutOfTime, Value
from temper.dashboard.series import Point, Progress
from temper.runs.state import QUERY, RunState, read_run_state
from temper.runs.store.arrays import unpack_loads

SHOWN_TEXT = 300
"""Characters of a response in a list."""
ROLLOUT_COLUMNS = (
    "stage", "step", "group_id", "member", "task_id", "status", "score", "score_kind", "reason", "num_tokens",
    "outcome", "text", "prompt",
)  # fmt: skip
MOST_COUNTED = 10_000
"""Rollouts that a filter counts; a reader of more does not care how many more."""
STATUSES = (
    "completed", "truncated_length", "truncated_turns", "bad_format", "tool_error", "timeout", "aborted",
    "too_long",
)  # fmt: skip
"""temper.types.Status, whose package imports torch. Which of them a run has, only a scan of all its rollouts tells."""
LAST_STEPS = "SELECT stage, step FROM steps WHERE groups_trained > 0 ORDER BY stage DESC, step DESC LIMIT ?"


def run_state(database: Database) -> RunState:
    return read_run_state(dict(database.rows(QUERY)))


def stages(database: Database) -> list[dict[str, Any]]:
    return database.records("SELECT stage, name, steps, started FROM stages ORDER BY stage")


def last_step(database: Database) -> tuple[int | None, int | None]:
    found = database.rows("SELECT stage, step FROM steps ORDER BY stage DESC, step DESC LIMIT 1")
    return found[0] if found else (None, None)


def metric_names(database: Database) -> list[str]:
    """Jumps from name to name along the primary key instead of reading every value."""
    found = database.rows(
        "WITH RECURSIVE n (name) AS (SELECT MIN(name) FROM metrics UNION ALL "
        "SELECT (SELECT MIN(name) FROM metrics WHERE metrics.name > n.name) FROM n WHERE n.name IS NOT NULL) "
        "SELECT name FROM n WHERE name IS NOT NULL"
    )
    return [name for (name,) in found]


def metric(database: Database, name: str) -> list[Point]:
    return database.rows("SELECT stage, step, value FROM metrics WHERE name = ? ORDER BY stage, step", name)


def losses(database: Database) -> list[Point]:
    return database.rows("SELECT stage, step, loss FROM steps ORDER BY stage, step")


def seconds(database: Database) -> dict[str, list[Point]]:
    """By phase."""
    found: dict[str, list[Point]] = {}
    for stage, step, name, value in database.iterate("SELECT stage, step, name, seconds FROM seconds ORDER BY 1, 2"):
        found.setdefault(name, []).append((stage, step, value))
    return found


def loaded_steps(database: Database) -> list[tuple[int, int]]:
    """(stage, step) of all steps whose experts were counted."""
    return database.rows("SELECT stage, step FROM loads ORDER BY stage, step")


def loads(database: Database, stage: int, step: int) -> tuple[list[int], NDArray[Any]] | None:
    """Numbers of the layers, and tokens [layers, experts]; None: that step has none."""
    rows = database.rows("SELECT layers, loads FROM loads WHERE stage = ? AND step = ?", stage, step)
    if not rows:
        return None
    layers = json.loads(rows[0][0])
    return layers, unpack_loads(rows[0][1], len(layers))


def progress(database: Database) -> list[Progress]:
    """What every step drew, trained and took."""
    return database.rows(
        "SELECT s.stage, s.step, s.tokens_drawn, s.tokens_trained, (SELECT SUM(seconds) FROM seconds t "
        "WHERE t.stage = s.stage AND t.step = s.step) FROM steps s ORDER BY 1, 2"
    )


def totals(database: Database) -> tuple[int, int, int, float]:
    """(steps, tokens drawn, tokens trained, seconds) of the whole run."""
    steps, drawn, trained = database.rows("SELECT COUNT(*), SUM(tokens_drawn), SUM(tokens_trained) FROM steps")[0]
    seconds = database.rows("SELECT SUM(seconds) FROM seconds")[0][0]
    return steps, drawn or 0, trained or 0, seconds or 0.0


def ends(database: Database, name: str) -> tuple[float | None, float | None]:
    """First and last value of a metric."""
    found = [
        database.rows(f"SELECT value FROM metrics WHERE name = ? ORDER BY stage {way}, step {way} LIMIT 1", name)
        for way in ("ASC", "DESC")
    ]
    return found[0][0][0] if found[0] else None, found[1][0][0] if found[1] else None


def alarm_levels(database: Database) -> dict[str, int]:
    """How many alarms of each level rang."""
    return dict(database.rows("SELECT level, COUNT(*) FROM alarms GROUP BY level"))


def evaluations(database: Database) -> list[dict[str, Any]]:
    rows = database.records("SELECT * FROM evaluations ORDER BY stage, step, name")
    return [{**row, "budget": json.loads(row["budget"]), "details": _json(row["details"])} for row in rows]


def audits(database: Database, most: int = 1000) -> list[dict[str, Any]]:
    """The newest audits, the oldest of them first."""
    rows = database.records(
        "SELECT * FROM audits ORDER BY stage DESC, step DESC, evaluation DESC, kind DESC, place DESC LIMIT ?", most
    )
    return [{**row, "prompt": json.loads(row["prompt"])} for row in reversed(rows)]


def alarms(database: Database, most: int = 2000) -> list[dict[str, Any]]:
    """The newest alarms, the oldest of them first."""
    rows = database.records(
        "SELECT stage, step, time, rule, level, value, text, meaning, advice FROM alarms "
        "ORDER BY stage DESC, step DESC, time DESC, rule DESC LIMIT ?",
        most,
    )
    return rows[::-1]


def events(database: Database, most: int = 200) -> list[dict[str, Any]]:
    """The newest events, the oldest of them first."""
    return database.records("SELECT time, level, text FROM events ORDER BY rowid DESC LIMIT ?", most)[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFilter:
    """Which rollouts to list. None: all."""

    stage: int | None = None
    step: int | None = None
    """Alone: exactly this step. With step_to: the first of a range."""
    step_to: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    status: str | None = None
    task: str | None = None
    """Part of a task's name."""
    min_length: int | None = None
    max_length: int | None = None
    q: str | None = None
    """Part of the prompt or of anything said after it. Letters match in either case, signs as they are."""


def rollouts(database: Database, wanted: RolloutFilter, offset: int, limit: int) -> tuple[list[dict[str, Any]], bool]:
    """Newest step first, each step in draw order; and whether there are more, or may be because time ran out."""
    found: list[dict[str, Any]] = []
    try:
        for place, row in enumerate(_matching(database, wanted)):
            if place >= offset + limit:
                return found, True
            if place >= offset:
                found.append(_listed(row))
    except OutOfTime:
        return found, True
    return found, False


def _listed(row: tuple[Any, ...]) -> dict[str, Any]:
    """`prompt`: the last thing that was asked."""
    shown = dict(zip(ROLLOUT_COLUMNS, row, strict=True))
    messages = json.loads(shown["prompt"])
    return {**shown, "prompt": str(messages[-1]["content"])[:SHOWN_TEXT] if messages else ""}


def count_rollouts(database: Database, wanted: RolloutFilter) -> tuple[int | None, bool]:
    """How many match, up to MOST_COUNTED, and whether that is all. None: time ran out before any were counted."""
    condition, values = _conditions(wanted)
    stage = "" if wanted.stage is None else " AND t.stage = ?"
    groups = " JOIN groups g USING (stage, step, group_id)" if "g." in condition else ""
    some = f"SELECT 1 FROM trajectories t{groups} WHERE 1{stage}{condition}"
    limit = f" LIMIT {MOST_COUNTED + 1}" if condition else ""  # all of a table or of a stage, an index counts
    given = [] if wanted.stage is None else [wanted.stage]
    try:
        found = int(database.rows(f"SELECT COUNT(*) FROM ({some}{limit})", *given, *values)[0][0])
    except OutOfTime:
        return None, False
    return (MOST_COUNTED, False) if condition and found > MOST_COUNTED else (found, True)


def _matching(database: Database, wanted: RolloutFilter) -> Iterator[tuple[Any, ...]]:
    """Stage by stage, so that a range of steps is a range of the key. CROSS JOIN keeps SQLite to that order: the rows
    of one step are sorted at a time, and nobody waits for steps that are never shown."""
    condition, values = _conditions(wanted)
    known = [stage["stage"] for stage in reversed(stages(database))]
    for stage in known if wanted.stage is None else [wanted.stage]:
        yield from database.iterate(
            "SELECT t.stage, t.step, t.group_id, t.member, g.task_id, t.status, t.score, t.score_kind, t.reason, "
            f"t.num_tokens, g.outcome, substr(t.text, 1, {SHOWN_TEXT}), g.prompt FROM trajectories t "
            "CROSS JOIN groups g ON g.stage = t.stage AND g.step = t.step AND g.group_id = t.group_id "
            f"WHERE t.stage = ?{condition} ORDER BY t.step DESC, g.draw, t.member",
            stage,
            *values,
        )


def _conditions(wanted: RolloutFilter) -> tuple[str, list[Value]]:
    step_to = wanted.step if wanted.step_to is None else wanted.step_to
    pairs: list[tuple[str, Value]] = [
        ("t.step >= ?", wanted.step),
        ("t.step <= ?", step_to),
        ("t.score >= ?", wanted.min_reward),
        ("t.score <= ?", wanted.max_reward),
        ("t.status = ?", wanted.status or None),
        ("t.num_tokens >= ?", wanted.min_length),
        ("t.num_tokens <= ?", wanted.max_length),
        ("g.task_id LIKE ? ESCAPE '\\'", like_pattern(wanted.task) if wanted.task else None),
    ]
    given = [(text, value) for text, value in pairs if value is not None]
    condition = "".join(f" AND {text}" for text, _ in given)
    values: list[Value] = [value for _, value in given]
    if wanted.q:
        # Conversations are stored as JSON, where a quotation mark or a line break is written with a backslash.
        inside = like_pattern(json.dumps(wanted.q, ensure_ascii=False)[1:-1])
        condition += " AND (t.text LIKE ? ESCAPE '\\' OR t.messages LIKE ? ESCAPE '\\' OR g.prompt LIKE ? ESCAPE '\\')"
        values += [like_pattern(wanted.q), inside, inside]
    return condition, values


def like_pattern(text: str) -> str:
    """LIKE's wildcards in what a user typed mean themselves."""
    escaped = text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return f"%{escaped}%"


def group(database: Database, stage: int, step: int, group_id: str) -> dict[str, Any] | None:
    found = database.records(
        "SELECT task_id, prompt, answer, outcome FROM groups WHERE stage = ? AND step = ? AND group_id = ?",
        *(stage, step, group_id),
    )
    return {**found[0], "prompt": json.loads(found[0]["prompt"])} if found else None


def members(database: Database, stage: int, step: int, group_id: str) -> list[dict[str, Any]]:
    """`text` is None where the transcript went to make room for newer ones."""
    rows = database.records(
        "SELECT member, status, score, score_kind, reason, parts, weighted, num_tokens, text, messages, finish, error, "
        "events FROM trajectories WHERE stage = ? AND step = ? AND group_id = ? ORDER BY member",
        *(stage, step, group_id),
    )
    return [_member(row) for row in rows]


def _member(row: dict[str, Any]) -> dict[str, Any]:
    alone = [{"role": "assistant", "content": row["text"]}] if row["finish"] and row["text"] is not None else []
    return {
        **row,
        "parts": json.loads(row["parts"]),
        "weighted": json.loads(row["weighted"]),
        "messages": _json(row["messages"]) or alone,
        "events": _json(row["events"]) or [],
    }


def verdicts(database: Database, stage: int, step: int, group_id: str, member: int) -> list[dict[str, Any]]:
    """What judges said of one rollout, in the order in which it was written."""
    rows = database.records(
        "SELECT part, kind, value, reason, fingerprint, detail FROM verdicts WHERE stage = ? AND step = ? AND "
        "group_id = ? AND member = ? ORDER BY rowid",
        *(stage, step, group_id, member),
    )
    return [{**row, "detail": _json(row["detail"]) or {}} for row in rows]


def token_rows(database: Database, stage: int, step: int, group_id: str) -> list[dict[str, Any]]:
    """Rows of tokens of every member of a group, arrays still packed."""
    return database.records(
        "SELECT * FROM token_rows WHERE stage = ? AND step = ? AND group_id = ? ORDER BY member, row",
        *(stage, step, group_id),
    )


def group_rates(database: Database) -> list[tuple[int, int, str, float]]:
    """(stage, step, group_id, mean score of its scored members): all of them, in the order of training."""
    return database.rows(
        "SELECT stage, step, group_id, AVG(score) FROM trajectories WHERE score_kind = 'value' "
        "GROUP BY stage, step, group_id"
    )


def ledger_counts(database: Database) -> tuple[dict[str, int], int]:
    """Draws by outcome, and distinct tasks."""
    outcomes = dict(database.rows("SELECT outcome, COUNT(*) FROM ledger GROUP BY outcome"))
    return outcomes, database.rows("SELECT COUNT(DISTINCT task_id) FROM ledger")[0][0]


def group_tasks(database: Database) -> dict[tuple[int, int, str], str]:
    """Task of every group."""
    rows = database.iterate("SELECT stage, step, group_id, task_id FROM groups")
    return {(stage, step, group_id): task_id for stage, step, group_id, task_id in rows}


def drawn_versions(database: Database, steps: int, most: int = 2000) -> list[tuple[int, bytes, bytes, str]]:
    """(weights version that trained it, packed loss mask, packed versions, how they are packed) of the last steps."""
    return database.rows(
        f"WITH last AS ({LAST_STEPS}) SELECT s.version, r.loss_mask, r.versions, r.codec FROM last "
        "JOIN steps s USING (stage, step) CROSS JOIN token_rows r ON r.stage = s.stage AND r.step = s.step "
        "WHERE r.advantages IS NOT NULL LIMIT ?",
        *(steps, most),
    )


def recent_seconds(database: Database, steps: int) -> dict[str, float]:
    """Total by phase over the last steps."""
    query = (
        f"WITH last AS ({LAST_STEPS}) SELECT name, SUM(seconds) FROM last JOIN seconds USING (stage, step) GROUP BY 1"
    )
    return dict(database.rows(query, steps))


def known_evaluations(database: Database) -> set[tuple[int, int, str, float | None]]:
    return set(database.rows("SELECT stage, step, name, score FROM evaluations"))


def known_alarms(database: Database) -> set[tuple[int, int, str, str]]:
    return set(database.rows("SELECT stage, step, rule, level FROM alarms"))


def _json(text: str | None) -> Any:
    return None if text is None else json.loads(text)
