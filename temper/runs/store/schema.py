"""The tables of run.db. Owns: their columns, their version, and which of them a rewind cuts back.

Arrays are little-endian and unpadded: token_ids and versions int32, log-probabilities, entropies, advantages and
weights float32, loss_mask uint8, loads int32; arrays.py packs them. NULL means "not known", never zero. A rollout whose
text is NULL has lost its transcript to the limit on them: what it scored and did to the world stays, what it said is
gone. Events without a turn are of a step that did not come back, or of an episode that has no row of its own.
"""

from __future__ import annotations

import sqlite3

from temper.errors import UserError

VERSION = "8"

SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);

CREATE TABLE stages (
    stage INTEGER PRIMARY KEY, name TEXT NOT NULL, steps INTEGER NOT NULL, started REAL NOT NULL);

CREATE TABLE steps (
    stage INTEGER, step INTEGER, version INTEGER NOT NULL, loss REAL,
    groups_trained INTEGER NOT NULL, groups_dropped INTEGER NOT NULL, max_staleness INTEGER NOT NULL,
    tokens_drawn INTEGER NOT NULL, tokens_trained INTEGER NOT NULL,
    PRIMARY KEY (stage, step)) WITHOUT ROWID;

CREATE TABLE metrics (
    stage INTEGER, step INTEGER, name TEXT, value REAL, PRIMARY KEY (name, stage, step)) WITHOUT ROWID;
CREATE INDEX metrics_by_step ON metrics (stage, step);

CREATE TABLE seconds (
    stage INTEGER, step INTEGER, name TEXT, seconds REAL, PRIMARY KEY (stage, step, name)) WITHOUT ROWID;

CREATE TABLE loads (
    stage INTEGER, step INTEGER, layers TEXT NOT NULL, loads BLOB NOT NULL, PRIMARY KEY (stage, step)) WITHOUT ROWID;

CREATE TABLE groups (
    stage INTEGER, step INTEGER, group_id TEXT, draw INTEGER NOT NULL, task_id TEXT NOT NULL,
    prompt TEXT NOT NULL, answer TEXT, outcome TEXT NOT NULL, PRIMARY KEY (stage, step, group_id)) WITHOUT ROWID;

CREATE TABLE trajectories (
    stage INTEGER, step INTEGER, group_id TEXT, member INTEGER, status TEXT NOT NULL,
    score_kind TEXT NOT NULL, score REAL, reason TEXT, parts TEXT NOT NULL, weighted TEXT NOT NULL,
    text TEXT, messages TEXT, finish TEXT, num_tokens INTEGER NOT NULL, error TEXT, seconds REAL NOT NULL,
    events TEXT, turn_rewards TEXT,
    PRIMARY KEY (stage, step, group_id, member));

CREATE TABLE token_rows (
    stage INTEGER, step INTEGER, group_id TEXT, member INTEGER, row INTEGER,
    token_ids BLOB NOT NULL, loss_mask BLOB NOT NULL, behavior_logprobs BLOB NOT NULL, versions BLOB NOT NULL,
    policy_logprobs BLOB, advantages BLOB, weights BLOB, entropies BLOB, codec TEXT NOT NULL,
    PRIMARY KEY (stage, step, group_id, member, row));

CREATE TABLE transcripts (
    stage INTEGER, step INTEGER, bytes INTEGER NOT NULL, PRIMARY KEY (stage, step)) WITHOUT ROWID;

CREATE TABLE evaluations (
    stage INTEGER, step INTEGER, name TEXT, score REAL, low REAL, high REAL, num_prompts INTEGER NOT NULL,
    samples_per_prompt INTEGER NOT NULL, constant_score REAL, budget TEXT NOT NULL, details TEXT,
    PRIMARY KEY (stage, step, name)) WITHOUT ROWID;

CREATE TABLE ledger (
    stage INTEGER, step INTEGER, place INTEGER, draw INTEGER, task_id TEXT NOT NULL, group_id TEXT NOT NULL,
    outcome TEXT NOT NULL, PRIMARY KEY (stage, step, place)) WITHOUT ROWID;
CREATE UNIQUE INDEX ledger_draws ON ledger (stage, draw);

CREATE TABLE prompts (
    stage INTEGER, task_id TEXT, step INTEGER, source TEXT NOT NULL, draws INTEGER NOT NULL,
    attempts INTEGER NOT NULL, passed REAL NOT NULL, rate REAL,
    PRIMARY KEY (stage, task_id, step)) WITHOUT ROWID;
CREATE INDEX prompts_by_step ON prompts (stage, step);

CREATE TABLE verdicts (
    stage INTEGER, step INTEGER, part TEXT NOT NULL, task_id TEXT NOT NULL, group_id TEXT NOT NULL,
    member INTEGER NOT NULL, kind TEXT NOT NULL, value REAL, reason TEXT, fingerprint TEXT NOT NULL, detail TEXT);
CREATE INDEX verdicts_by_member ON verdicts (stage, step, group_id, member);

CREATE TABLE events (time REAL NOT NULL, level TEXT NOT NULL, text TEXT NOT NULL);

CREATE TABLE audits (
    stage INTEGER, step INTEGER, evaluation TEXT, place INTEGER, kind TEXT, task_id TEXT NOT NULL,
    prompt TEXT NOT NULL, text TEXT NOT NULL, reward REAL, heldout REAL,
    PRIMARY KEY (stage, step, evaluation, kind, place));

CREATE TABLE heldout_effects (
    stage INTEGER, step INTEGER, evaluation TEXT, place INTEGER, task_id TEXT NOT NULL, member INTEGER NOT NULL,
    turn INTEGER, kind TEXT NOT NULL, name TEXT NOT NULL, detail TEXT NOT NULL,
    PRIMARY KEY (stage, step, evaluation, place)) WITHOUT ROWID;

CREATE TABLE alarms (
    stage INTEGER, step INTEGER, time REAL NOT NULL, rule TEXT, level TEXT NOT NULL, value REAL,
    text TEXT NOT NULL, meaning TEXT NOT NULL, advice TEXT NOT NULL,
    PRIMARY KEY (stage, step, rule));
"""
# loads: tokens of each expert of a mixture, layer after layer; layers: their numbers as JSON.
# prompts: the history of a prompt after every step that consumed a group of it; the newest row is how it stands.
# heldout_effects: what attempts at held-out tasks did to the world; those of training are events of their rollouts.
# transcripts: the steps whose rollouts still have their texts and tokens, and what these take.
# The unique draw makes the ledger exactly-once: a prompt that is consumed twice fails the step instead of the science.

STEP_TABLES = (
    "steps", "metrics", "seconds", "groups", "trajectories", "token_rows", "transcripts", "evaluations", "ledger",
    "prompts", "verdicts", "audits", "alarms", "loads", "heldout_effects",
)  # fmt: skip
"""What a rewind cuts back to a step. Events stay: they tell what happened to the process, killed attempts included."""

_NO_VERDICTS = """
CREATE TEMP VIEW trajectories AS SELECT *, NULL AS turn_rewards FROM main.trajectories;
CREATE TEMP VIEW verdicts AS SELECT NULL AS rowid, NULL AS stage, NULL AS step, NULL AS part, NULL AS task_id,
    NULL AS group_id, NULL AS member, NULL AS kind, NULL AS value, NULL AS reason, NULL AS fingerprint,
    NULL AS detail WHERE 0;
"""

_RAW_ARRAYS = "CREATE TEMP VIEW token_rows AS SELECT *, 'raw' AS codec FROM main.token_rows;"

_NO_PROMPTS = """
CREATE TEMP VIEW prompts AS SELECT NULL AS stage, NULL AS task_id, NULL AS step, NULL AS source, NULL AS draws,
    NULL AS attempts, NULL AS passed, NULL AS rate WHERE 0;
"""

_NO_LOADS = "CREATE TEMP VIEW loads AS SELECT NULL AS stage, NULL AS step, NULL AS layers, NULL AS loads WHERE 0;"

_NO_EFFECTS = """
CREATE TEMP VIEW heldout_effects AS SELECT NULL AS stage, NULL AS step, NULL AS evaluation, NULL AS place,
    NULL AS task_id, NULL AS member, NULL AS turn, NULL AS kind, NULL AS name, NULL AS detail WHERE 0;
"""

_LAYOUT_6 = f"{_NO_EFFECTS} {_NO_LOADS}"
_LAYOUT_5 = f"{_LAYOUT_6} {_NO_PROMPTS}"

OLD_LAYOUTS = {
    "7": _NO_EFFECTS,
    "6": _LAYOUT_6,
    "5": _LAYOUT_5,
    "4": f"{_LAYOUT_5} {_RAW_ARRAYS}",
    "3": f"{_LAYOUT_5} {_NO_VERDICTS} {_RAW_ARRAYS}",
    "2": f"""{_LAYOUT_5} {_NO_VERDICTS}
CREATE TEMP VIEW token_rows AS SELECT *, NULL AS entropies, 'raw' AS codec FROM main.token_rows;
CREATE TEMP VIEW evaluations AS SELECT *, NULL AS details FROM main.evaluations;
CREATE TEMP VIEW audits AS SELECT NULL AS stage, NULL AS step, NULL AS evaluation, NULL AS place, NULL AS kind,
    NULL AS task_id, NULL AS prompt, NULL AS text, NULL AS reward, NULL AS heldout WHERE 0;
CREATE TEMP VIEW alarms AS SELECT NULL AS stage, NULL AS step, NULL AS time, NULL AS rule, NULL AS level,
    NULL AS value, NULL AS text, NULL AS meaning, NULL AS advice WHERE 0;
""",
}
"""What makes an older layout look like this one to a reader. In the reader's own memory: the file stays as it is."""


def prepare(connection: sqlite3.Connection) -> bool:
    """Makes the tables of a new run, or checks those of an old one. True when the run is new."""
    connection.execute("PRAGMA journal_mode = WAL")
    # FULL: a step that flush() called durable survives a power cut. One transaction per step, off the training thread.
    connection.execute("PRAGMA synchronous = FULL")
    if not connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
        connection.executescript(f"BEGIN IMMEDIATE; {SCHEMA} INSERT INTO meta VALUES ('schema', '{VERSION}'); COMMIT;")
        return True
    layout = layout_of(connection)
    if layout in OLD_LAYOUTS:
        raise UserError(
            f"run.db has layout {layout} of an earlier version of Temper, which this one reads and cannot go on with: "
            f"it writes layout {VERSION}. Finish the run with the version that began it, or begin a new one from its "
            f"last checkpoint (model.path) with another --run."
        )
    _require_known(layout)
    return False


def prepare_reading(connection: sqlite3.Connection) -> None:
    """Makes a run of any known layout look like one of this layout."""
    layout = layout_of(connection)
    if layout in OLD_LAYOUTS:
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.executescript(OLD_LAYOUTS[layout])
    else:
        _require_known(layout)


def layout_of(connection: sqlite3.Connection) -> str | None:
    """None: not a run of Temper."""
    try:
        row = connection.execute("SELECT value FROM meta WHERE name = 'schema'").fetchone()
    except sqlite3.OperationalError:
        row = None
    return None if row is None else str(row[0])


def _require_known(layout: str | None) -> None:
    if layout != VERSION:
        found = "is not a run of Temper" if layout is None else f"has layout {layout}"
        raise UserError(f"run.db {found}; this version of Temper reads layout {VERSION}. Use another --run.")
