"""A run.db opened to be read: never written, never longer than a deadline.

Owns: the connection, its time limit, one snapshot per answer. Refuses: changing anything; SQLite would reject it.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from temper.errors import UserError
from temper.runs.store.schema import prepare_reading

DATABASE = "run.db"
QUERY_SECONDS = 8.0
"""Of work, for all queries of one answer together: a question is refused for being large and not because the machine is
busy, as it is where a model trains beside it."""
WAIT_SECONDS = 45.0
"""Of waiting for the same, on a machine that does not get to it."""
BUSY_SECONDS = 5.0
"""A reader waits for a writer only while a crashed run's log is recovered."""
CHECK_EVERY = 20_000
"""Instructions of SQLite's machine between two looks at the clock: about a millisecond."""

Value = str | int | float | None


class OutOfTime(Exception):
    """A query met its deadline."""


def connect(path: Path) -> sqlite3.Connection:
    """Read-only, older layouts made to look like today's. May be handed from thread to thread, one at a time.

    A run in a folder we may not write to cannot make its WAL index, and when it was closed cleanly it needs none.
    """
    if not path.is_file():
        raise UserError(f"{path.parent} is not a run directory any more: it has no {path.name}")
    address = path.absolute().as_uri()
    try:
        connection = _open(f"{address}?mode=ro")
    except sqlite3.OperationalError:
        if path.with_name(f"{path.name}-wal").exists():
            raise
        connection = _open(f"{address}?mode=ro&immutable=1")
    try:
        prepare_reading(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _open(address: str) -> sqlite3.Connection:
    connection = sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


class Database:
    """One snapshot of a run: every query of an answer sees the same steps. Asked by the thread that made it."""

    def __init__(self, connection: sqlite3.Connection, seconds: float) -> None:
        self._connection = connection
        work, wait = time.thread_time() + seconds, time.monotonic() + max(seconds, WAIT_SECONDS)
        connection.set_progress_handler(lambda: time.thread_time() > work or time.monotonic() > wait, CHECK_EVERY)

    def iterate(self, text: str, *values: Value) -> Iterator[tuple[Any, ...]]:
        """Rows one by one. Raises OutOfTime, in the middle if need be, when the deadline has passed."""
        with _deadline_told():
            yield from self._connection.execute(text, values)

    def rows(self, text: str, *values: Value) -> list[tuple[Any, ...]]:
        return list(self.iterate(text, *values))

    def records(self, text: str, *values: Value) -> list[dict[str, Any]]:
        """Rows by column name: for those that are few."""
        with _deadline_told():
            cursor = self._connection.execute(text, values)
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]


@contextmanager
def _deadline_told() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_INTERRUPT:
            raise OutOfTime("this question takes too long on so large a run. Ask for fewer steps") from error
        raise


@contextmanager
def reading(folder: Path, seconds: float = QUERY_SECONDS) -> Iterator[Database]:
    """The run in this folder as it is now."""
    with closing(connect(folder / DATABASE)) as connection:
        connection.execute("BEGIN")  # deferred: the first SELECT takes the snapshot, and no lock keeps a writer out
        yield Database(connection, seconds)


def signature(folder: Path) -> tuple[Any, ...]:
    """Changes with every write. Two calls of stat are cheaper than a connection that is kept open for data_version, and
    notice a replaced file, too."""
    path = folder / DATABASE
    log = path.with_name(f"{path.name}-wal")
    facts = [path.stat(), *([log.stat()] if log.exists() else [])]
    return tuple((fact.st_ino, fact.st_size, fact.st_mtime_ns) for fact in facts)
