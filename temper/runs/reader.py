"""Looks into a run directory without disturbing it: while it is written, after it ended, and after a crash.

Owns: queries and their record types. Refuses: writing; the database is opened read-only.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from temper.errors import UserError
from temper.runs.records import AlarmRecord, AuditRecord, EffectRecord, PromptRecord, VerdictRecord
from temper.runs.state import QUERY, RunState, read_run_state
from temper.runs.store.arrays import ARRAY_TYPES, unpack_array
from temper.runs.store.schema import prepare_reading
from temper.types import EvaluationResult, EventKind, Message, Scalar

DATABASE = "run.db"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    stage: int
    name: str
    steps: int
    """Number of planned steps."""
    started: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    stage: int
    step: int
    version: int
    loss: float | None
    """None: it was not a number."""
    groups_trained: int
    groups_dropped: int
    max_staleness: int
    tokens_drawn: int
    """Tokens drawn by the policy, dropped groups included."""
    tokens_trained: int
    """Tokens with a gradient, counted once per update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value of a metric."""

    stage: int
    step: int
    value: float | None
    """None: it was not a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    stage: int
    step: int
    draw: int | None
    """Place in the stage's task stream; None when the source does not number its draws."""
    task_id: str
    group_id: str
    outcome: str
    """"trained" or "dropped:<reason>"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    time: float
    level: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """Parallel arrays over all tokens of one row, prompt included."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    behavior_logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    policy_logprobs: NDArray[np.float32] | None
    """Log-probabilities by the trainer, before the step changed the weights; None: not computed or not kept."""
    advantages: NDArray[np.float32] | None
    """None: not trained."""
    weights: NDArray[np.float32] | None
    entropies: NDArray[np.float32] | None
    """Entropy of the distribution each token was drawn from; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRecord:
    stage: int
    step: int
    group_id: str
    index: int
    task_id: str
    prompt: tuple[Message, ...]
    answer: str | None
    outcome: str
    """What became of its group: "trained" or "dropped:<reason>"."""
    status: str
    score_kind: str
    score: float | None
    reason: str | None
    parts: Mapping[str, float | str | None]
    """Value of each reward part, or the reason why it has none."""
    weighted: Mapping[str, float | str | None]
    """What each part added to the score, after bounds, weight and gates."""
    text: str | None
    """The last thing the policy said. None: the transcript went to make room for newer ones; there are then no
    messages and rows either, and of the events those that did something to the world or were refused."""
    messages: tuple[Message, ...]
    """Everything after the prompt, policy and environment in turn."""
    finish: str | None
    num_tokens: int
    error: str | None
    events: tuple[Mapping[str, Any], ...]
    """What its environment did: turn, kind, name, detail, cost. The turn is None for what stands in none: of a step
    that did not come back, or of an attempt that failed and was replaced."""
    turn_rewards: tuple[float | None, ...]
    """What each turn earned, when a part of the reward pays turns; else empty."""
    rows: tuple[TokenRow, ...]


class RunReader:
    """Queries over one run directory."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / DATABASE
        if not path.is_file():
            raise UserError(f"{folder} is not a run directory: it has no {DATABASE}")
        try:
            self._connection = _connect(path)
            prepare_reading(self._connection)
        except sqlite3.Error as error:
            raise UserError(f"{path} cannot be read: {error}") from error

    def __enter__(self) -> RunReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    @property
    def state(self) -> RunState:
        return read_run_state({row["name"]: row["value"] for row in self.query(QUERY)})

    @property
    def is_finished(self) -> bool:
        return self.state.is_finished

    def stages(self) -> list[StageRecord]:
        return [StageRecord(**row) for row in self.query("SELECT * FROM stages ORDER BY stage")]

    def steps(self) -> list[StepRecord]:
        return [StepRecord(**row) for row in self.query("SELECT * FROM steps ORDER BY stage, step")]

    def metric(self, name: str) -> list[Point]:
        rows = self.query("SELECT stage, step, value FROM metrics WHERE name = ? ORDER BY stage, step", name)
        return [Point(**row) for row in rows]

    def metrics_at(self, stage: int, step: int) -> dict[str, float | None]:
        rows = self.query("SELECT name, value FROM metrics WHERE stage = ? AND step = ? ORDER BY name", stage, step)
        return {row["name"]: row["value"] for row in rows}

    def seconds(self) -> dict[tuple[int, str], float]:
        """Total wall time by (stage, phase)."""
        rows = self.query("SELECT stage, name, SUM(seconds) AS total FROM seconds GROUP BY stage, name")
        return {(row["stage"], row["name"]): row["total"] for row in rows}

    def evaluations(self) -> list[EvaluationResult]:
        rows = self.query("SELECT * FROM evaluations ORDER BY stage, step, name")
        return [EvaluationResult(**_with_numbers(row), **_decoded(row)) for row in rows]

    def audits(self) -> list[AuditRecord]:
        """By evaluation; "random" before "top", each in its order."""
        rows = self.query("SELECT * FROM audits ORDER BY stage, step, evaluation, kind, place")
        return [AuditRecord(**{**row, "prompt": _messages(row["prompt"])}) for row in rows]

    def heldout_effects(self) -> list[EffectRecord]:
        """By evaluation, each in its order."""
        rows = self.query("SELECT * FROM heldout_effects ORDER BY stage, step, evaluation, place")
        return [EffectRecord(**{**row, "kind": EventKind(row["kind"])}) for row in rows]

    def verdicts(self, stage: int, step: int) -> list[VerdictRecord]:
        """What judges said of the rollouts of one step and of its evaluation, in the order in which it was written."""
        rows = self.query("SELECT * FROM verdicts WHERE stage = ? AND step = ? ORDER BY rowid", stage, step)
        return [VerdictRecord(**{**row, "detail": json.loads(row["detail"] or "{}")}) for row in rows]

    def alarms(self) -> list[AlarmRecord]:
        """In the order in which they fired."""
        return [AlarmRecord(**row) for row in self.query("SELECT * FROM alarms ORDER BY stage, step, time, rule")]

    def ledger(self) -> list[LedgerEntry]:
        query = "SELECT stage, step, draw, task_id, group_id, outcome FROM ledger ORDER BY stage, step, place"
        return [LedgerEntry(**row) for row in self.query(query)]

    def prompts(self) -> list[PromptRecord]:
        """How every prompt of every stage stands: its history after the last step that consumed a group of it."""
        # Of each group SQLite gives the row with the largest step.
        rows = self.query(
            "SELECT stage, task_id, MAX(step) AS step, source, draws, attempts, passed, rate FROM prompts "
            "GROUP BY stage, task_id ORDER BY stage, task_id"
        )
        return [PromptRecord(**row) for row in rows]

    def prompt_history(self, stage: int, task_id: str) -> list[PromptRecord]:
        """One prompt after every step that consumed a group of it."""
        rows = self.query("SELECT * FROM prompts WHERE stage = ? AND task_id = ? ORDER BY step", stage, task_id)
        return [PromptRecord(**row) for row in rows]

    def events(self) -> list[EventRecord]:
        return [EventRecord(**row) for row in self.query("SELECT * FROM events ORDER BY rowid")]

    def failures(self) -> dict[str, int]:
        """How many rollouts could not be scored or broke, by reason, commonest first."""
        rows = self.query(
            "SELECT COALESCE(error, score_kind || ': ' || reason) AS why, COUNT(*) AS times FROM trajectories "
            "WHERE error IS NOT NULL OR score_kind != 'value' GROUP BY why ORDER BY times DESC, why"
        )
        return {row["why"]: row["times"] for row in rows}

    def failing_tasks(self) -> dict[str, tuple[str, ...]]:
        """Tasks whose rollouts could not be scored or broke, by the reasons of failures(), each once."""
        found: dict[str, dict[str, None]] = {}
        for row in self.query(
            "SELECT DISTINCT COALESCE(t.error, t.score_kind || ': ' || t.reason) AS why, g.task_id FROM trajectories t "
            "JOIN groups g USING (stage, step, group_id) WHERE t.error IS NOT NULL OR t.score_kind != 'value' "
            "ORDER BY why, g.task_id"
        ):
            found.setdefault(row["why"], {})[row["task_id"]] = None
        return {why: tuple(tasks) for why, tasks in found.items()}

    def trajectories(self, stage: int, step: int) -> list[TrajectoryRecord]:
        """Every rollout of one step with its tokens, in draw and member order."""
        rows: dict[tuple[str, int], list[TokenRow]] = {}
        for row in self.query("SELECT * FROM token_rows WHERE stage = ? AND step = ? ORDER BY row", stage, step):
            rows.setdefault((row["group_id"], row["member"]), []).append(TokenRow(**_arrays(row)))
        found = self.query(
            "SELECT t.*, g.task_id, g.prompt, g.answer, g.outcome FROM trajectories t "
            "JOIN groups g USING (stage, step, group_id) WHERE stage = ? AND step = ? ORDER BY g.draw, t.member",
            stage,
            step,
        )
        return [_trajectory(row, tuple(rows.get((row["group_id"], row["member"]), ()))) for row in found]

    def fingerprint(self) -> dict[str, str]:
        """sha256 by table of all that must be equal in a run that was killed and resumed: all but clocks and speeds."""
        queries = {
            "steps": "SELECT * FROM steps ORDER BY stage, step",
            # A judge's counts are of the process; what it said is in verdicts.
            "metrics": "SELECT stage, step, name, value FROM metrics WHERE name NOT LIKE 'sys/%' "
            "AND name NOT LIKE 'judge/%' ORDER BY 1, 2, 3",
            "loads": "SELECT * FROM loads ORDER BY stage, step",
            "ledger": "SELECT * FROM ledger ORDER BY stage, step, place",
            "prompts": "SELECT * FROM prompts ORDER BY stage, task_id, step",
            "evaluations": "SELECT * FROM evaluations ORDER BY stage, step, name",
            "audits": "SELECT * FROM audits ORDER BY stage, step, evaluation, kind, place",
            "heldout_effects": "SELECT * FROM heldout_effects ORDER BY stage, step, evaluation, place",
            "groups": "SELECT * FROM groups ORDER BY stage, step, group_id",
            "trajectories": "SELECT stage, step, group_id, member, status, score_kind, score, reason, parts, weighted, "
            "text, messages, finish, num_tokens, events, turn_rewards FROM trajectories "
            "ORDER BY stage, step, group_id, member",
            # Of rollouts only: a judge is measured on its labelled set whenever a process begins.
            "verdicts": "SELECT v.* FROM verdicts v JOIN groups USING (stage, step, group_id) ORDER BY v.rowid",
            "token_rows": "SELECT * FROM token_rows ORDER BY stage, step, group_id, member, row",
        }
        prints = {}
        for table, query in queries.items():
            digest = hashlib.sha256()
            for row in self._connection.execute(query):
                digest.update(repr(_unpacked(row) if table == "token_rows" else tuple(row)).encode())
            prints[table] = digest.hexdigest()
        return prints

    def query(self, text: str, *values: Scalar) -> list[dict[str, Any]]:
        """Rows of a SELECT as dictionaries."""
        return [dict(row) for row in self._connection.execute(text, values)]


def _connect(path: Path) -> sqlite3.Connection:
    """Read-only. A cleanly closed run in a folder we may not write to cannot make its WAL index, and needs none."""
    address = path.absolute().as_uri()
    try:
        connection = sqlite3.connect(f"{address}?mode=ro", uri=True, timeout=30.0)
        connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
    except sqlite3.OperationalError:
        if path.with_name(f"{path.name}-wal").exists():
            raise
        connection = sqlite3.connect(f"{address}?mode=ro&immutable=1", uri=True, timeout=30.0)
    connection.row_factory = sqlite3.Row
    return connection


def _arrays(row: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of a row of tokens by name; None where there is none."""
    blobs = {name: row[name] for name in ARRAY_TYPES}
    return {name: None if blob is None else unpack_array(blob, name, row["codec"]) for name, blob in blobs.items()}


def _unpacked(row: sqlite3.Row) -> tuple[Any, ...]:
    """A row of tokens as the oldest layouts hold it: what was drawn is the same however it is packed."""
    key = (row[name] for name in ("stage", "step", "group_id", "member", "row"))
    arrays = _arrays(dict(row)).values()
    return (*key, *(None if array is None else array.tobytes() for array in arrays))


def _messages(text: str) -> tuple[Message, ...]:
    return tuple(Message(**message) for message in json.loads(text))


def _decoded(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of an evaluation that hold JSON."""
    return {"budget": json.loads(row["budget"]), "details": json.loads(row["details"] or "{}")}


def _with_numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """The other columns of an evaluation, with NULL back to the NaN that it was."""
    plain = {name: value for name, value in row.items() if name not in ("budget", "details")}
    return {name: float("nan") if value is None else value for name, value in plain.items()}


def _trajectory(row: Mapping[str, Any], rows: tuple[TokenRow, ...]) -> TrajectoryRecord:
    alone = [{"role": "assistant", "content": row["text"]}] if row["finish"] and row["text"] is not None else []
    said = json.loads(row["messages"]) if row["messages"] else alone
    decoded = ("prompt", "parts", "weighted", "messages", "events", "turn_rewards")
    plain = {name: row[name] for name in TrajectoryRecord.__dataclass_fields__ if name in row and name not in decoded}
    return TrajectoryRecord(
        **plain,
        index=row["member"],
        prompt=_messages(row["prompt"]),
        parts=json.loads(row["parts"]),
        weighted=json.loads(row["weighted"]),
        messages=tuple(Message(**message) for message in said),
        events=tuple(json.loads(row["events"] or "[]")),
        turn_rewards=tuple(json.loads(row["turn_rewards"] or "[]")),
        rows=rows,
    )
