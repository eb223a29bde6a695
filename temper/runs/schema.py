"""The tables of run.db. Owns: their columns, their version, and which of them a rewind cuts back.

Arrays are little-endian and unpadded: token_ids and versions int32, log-probabilities, advantages and weights float32,
loss_mask uint8. NULL means "not known", never zero.
"""

from __future__ import annotations

import sqlite3

from temper.errors import UserError

VERSION = "2"

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

CREATE TABLE groups (
    stage INTEGER, step INTEGER, group_id TEXT, draw INTEGER NOT NULL, task_id TEXT NOT NULL,
    prompt TEXT NOT NULL, answer TEXT, outcome TEXT NOT NULL, PRIMARY KEY (stage, step, group_id)) WITHOUT ROWID;

CREATE TABLE trajectories (
    stage INTEGER, step INTEGER, group_id TEXT, member INTEGER, status TEXT NOT NULL,
    score_kind TEXT NOT NULL, score REAL, reason TEXT, parts TEXT NOT NULL, weighted TEXT NOT NULL,
    text TEXT NOT NULL, messages TEXT, finish TEXT, num_tokens INTEGER NOT NULL, error TEXT, seconds REAL NOT NULL,
    events TEXT,
    PRIMARY KEY (stage, step, group_id, member));

CREATE TABLE token_rows (
    stage INTEGER, step INTEGER, group_id TEXT, member INTEGER, row INTEGER,
    token_ids BLOB NOT NULL, loss_mask BLOB NOT NULL, behavior_logprobs BLOB NOT NULL, versions BLOB NOT NULL,
    policy_logprobs BLOB, advantages BLOB, weights BLOB,
    PRIMARY KEY (stage, step, group_id, member, row));

CREATE TABLE evaluations (
    stage INTEGER, step INTEGER, name TEXT, score REAL, low REAL, high REAL, num_prompts INTEGER NOT NULL,
    samples_per_prompt INTEGER NOT NULL, constant_score REAL, budget TEXT NOT NULL,
    PRIMARY KEY (stage, step, name)) WITHOUT ROWID;

CREATE TABLE ledger (
    stage INTEGER, step INTEGER, place INTEGER, draw INTEGER, task_id TEXT NOT NULL, group_id TEXT NOT NULL,
    outcome TEXT NOT NULL, PRIMARY KEY (stage, step, place)) WITHOUT ROWID;
CREATE UNIQUE INDEX ledger_draws ON ledger (stage, draw);

CREATE TABLE events (time REAL NOT NULL, level TEXT NOT NULL, text TEXT NOT NULL);
"""
# The unique draw makes the ledger exactly-once: a prompt that is consumed twice fails the step instead of the science.

STEP_TABLES = ("steps", "metrics", "seconds", "groups", "trajectories", "token_rows", "evaluations", "ledger")
"""What a rewind cuts back to a step. Events stay: they tell what happened to the process, killed attempts included."""


def prepare(connection: sqlite3.Connection) -> bool:
    """Makes the tables of a new run, or checks those of an old one. True when the run is new."""
    connection.execute("PRAGMA journal_mode = WAL")
    # FULL: a step that flush() called durable survives a power cut. One transaction per step, off the training thread.
    connection.execute("PRAGMA synchronous = FULL")
    if not connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
        connection.executescript(f"BEGIN IMMEDIATE; {SCHEMA} INSERT INTO meta VALUES ('schema', '{VERSION}'); COMMIT;")
        return True
    check_version(connection)
    return False


def check_version(connection: sqlite3.Connection) -> None:
    try:
        row = connection.execute("SELECT value FROM meta WHERE name = 'schema'").fetchone()
    except sqlite3.OperationalError:
        row = None
    if row is None or row[0] != VERSION:
        found = f"has layout {row[0]}" if row else "is not a run of Temper"
        raise UserError(f"run.db {found}; this version of Temper reads layout {VERSION}. Use another --run.")
