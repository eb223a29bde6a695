"""The memory of a run: all that happened, in run.db, written by one thread so that training does not wait for disk.

Owns: the writer thread, its bounded queue, durability, rewinding on resume. Refuses: reading (reader.py), checkpoints.
"""

from __future__ import annotations

import difflib
import math
import queue
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from temper.errors import BackendError, DiskFull, TemperError, UserError, is_disk_full
from temper.runs.records import AlarmRecord, AuditRecord, EffectRecord, VerdictRecord
from temper.runs.state import BEAT_SECONDS, Ending, ended_row, heartbeat_row
from temper.runs.store import encode
from temper.runs.store.lock import RunLock
from temper.runs.store.schema import STEP_TABLES, prepare
from temper.runs.store.transcripts import limit_transcripts
from temper.storable import storable
from temper.types import Batch, EvaluationResult, Group, StepReport

DATABASE = "run.db"
RUNS = Path("runs")
"""Where runs are written down that name no folder."""
LOCK = "run.lock"
CONFIG = "config.toml"
OWN_NAMES = {
    DATABASE,
    f"{DATABASE}-wal",
    f"{DATABASE}-shm",
    LOCK,
    CONFIG,
    f"{CONFIG}.new",
    "checkpoints",
    "data",
    "model",
}
"""What a directory without a run.db may hold: what is left of a run that was killed in its first instant."""
QUEUE_STEPS = 2
"""Steps that may wait for the disk; then append() waits. Bounds host memory."""
PATIENCE_SECONDS = 600.0
"""How long append() waits for a disk that does not keep up before it gives up."""

Job = Callable[[sqlite3.Connection], None]


def open_run(folder: Path, *, config: str, resume: bool, transcript_bytes: float = math.inf) -> RunStore:
    """The store of a run directory, locked for this process and ready to write.

    config: the resolved recipe, kept as config.toml. Without resume the directory must be new or empty; with it, it
    holds a run, finished or not, or one that was killed before its first write. transcript_bytes: what the transcripts
    of rollouts may take.
    """
    _check_folder(folder, resume)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as undo:
        lock = RunLock(folder / LOCK)
        lock.seize()
        undo.callback(lock.release)
        try:
            connection = sqlite3.connect(folder / DATABASE, isolation_level=None, check_same_thread=False, timeout=60.0)
            undo.callback(connection.close)
            is_new = prepare(connection)
            if not (resume or is_new):
                raise UserError(_taken(folder, connection))
            change = _keep_config(folder / CONFIG, config)
            _beat(connection)  # a run that just began reads as running, also to one who looks at once
        except (sqlite3.Error, OSError) as error:
            raise _as_temper_error(error, folder) from error
        undo.pop_all()
    store = RunStore(folder, connection, lock, transcript_bytes)
    store.start()
    if change:
        store.event("warning", f"resumed with a changed configuration:\n{change}")
    return store


def _check_folder(folder: Path, resume: bool) -> None:
    """Refuses a path that is not a run before anything is written there."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, not a run directory. Use another --run.")
    if resume and not folder.is_dir():
        raise UserError(f"{folder} does not exist, so there is no run to resume. Leave out --resume to start one.")
    if folder.is_dir() and not (folder / DATABASE).is_file():
        foreign = sorted({path.name for path in folder.iterdir()} - OWN_NAMES)
        if foreign:
            raise UserError(
                f"{folder} is not a run directory: it has no {DATABASE} but holds {', '.join(foreign[:3])}. "
                "Use a new or empty directory."
            )


def _taken(folder: Path, connection: sqlite3.Connection) -> str:
    is_finished = connection.execute("SELECT 1 FROM meta WHERE name = 'finished'").fetchone() is not None
    state = "a finished run" if is_finished else "a run that is not finished"
    return f"{folder} holds {state}. Pass --resume to go on from its last checkpoint, or use another --run."


def _keep_config(path: Path, text: str) -> str:
    """Writes config.toml in one piece; returns what differs from the one that was there."""
    before = path.read_text(encoding="utf-8") if path.is_file() else text
    aside = path.with_name(f"{path.name}.new")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
    return "\n".join(difflib.unified_diff(before.splitlines(), text.splitlines(), "before", "now", lineterm="", n=0))


class RunStore:
    """Everything is a job for the writer thread; each job is one transaction. A failed job ends the writer, and the
    next append() or flush() raises what happened: later steps must not be recorded over a hole."""

    def __init__(
        self, folder: Path, connection: sqlite3.Connection, lock: RunLock, transcript_bytes: float = math.inf
    ) -> None:
        self.folder = folder
        self._transcript_bytes = transcript_bytes
        self._connection = connection
        self._lock = lock
        self._jobs: queue.Queue[Job | None] = queue.Queue(QUEUE_STEPS)
        self._failure: BaseException | None = None
        self._is_reported = False
        self._is_closed = False
        self._writer = threading.Thread(target=self._write, name="run store", daemon=True)

    def start(self) -> None:
        self._writer.start()
        self._submit(lambda connection: _drop_meta(connection, "ended"))  # it goes on, whatever ended it before

    def begin_stage(self, stage: int, name: str, steps: int) -> None:
        """Notes a stage, from its first step or again after a resume."""
        row = (stage, name, steps, time.time())
        update = "ON CONFLICT (stage) DO UPDATE SET name = excluded.name, steps = excluded.steps"
        self._submit(lambda connection: _insert(connection, "stages", [row], update))

    def append(self, report: StepReport, batch: Batch) -> None:
        """Records one step, all of it or nothing. Returns at once unless QUEUE_STEPS steps wait already."""
        self._submit(lambda connection: _insert_step(connection, report, batch, self._transcript_bytes))

    def evaluation(self, result: EvaluationResult) -> None:
        """Records a held-out score. Repeated after a resume it replaces itself."""
        row = encode.evaluation_row(result)
        self._submit(lambda connection: _insert(connection, "evaluations", [row], replace=True))

    def audit(self, audits: Sequence[AuditRecord], effects: Sequence[EffectRecord] = ()) -> None:
        """Records what people should read of an evaluation: transcripts, and what was done to the world. Repeated after
        a resume they replace themselves."""
        rows = [encode.audit_row(audit) for audit in audits]
        self._submit(lambda connection: _insert(connection, "audits", rows, replace=True))
        if done := [encode.effect_row(effect) for effect in effects]:
            self._submit(lambda connection: _insert(connection, "heldout_effects", done, replace=True))

    def verdicts(self, verdicts: Sequence[VerdictRecord]) -> None:
        """Records what judges said, in this order. Each verdict once: none has a name by which it could be replaced."""
        rows = [encode.verdict_row(verdict) for verdict in verdicts]
        self._submit(lambda connection: _insert(connection, "verdicts", rows))

    def alarm(self, alarm: AlarmRecord) -> None:
        """Records that a rule fired. Repeated after a resume it replaces itself."""
        row = encode.alarm_row(alarm)
        self._submit(lambda connection: _insert(connection, "alarms", [row], replace=True))

    def event(self, level: str, text: str) -> None:
        """Records something worth telling: level is note, warning or error."""
        row = (time.time(), level, text)
        self._submit(lambda connection: _insert(connection, "events", [row]))

    def keep_config(self, text: str) -> None:
        """Replaces config.toml: a stage has begun, and what its recipe left open is settled."""
        _keep_config(self.folder / CONFIG, text)

    def finish(self, deadline_seconds: float = PATIENCE_SECONDS) -> None:
        """Marks the run as complete."""
        row = ("finished", repr(time.time()))
        self._submit(lambda connection: _insert(connection, "meta", [row], replace=True))
        self.flush(deadline_seconds)

    def end(self, state: Ending, text: str) -> None:
        """Notes that the run ends before its last step, and why."""
        row = ended_row(state, text)
        self._submit(lambda connection: _insert(connection, "meta", [row], replace=True))

    def unfinished(self, stage: int, step: int, groups: Sequence[tuple[Group, str]]) -> None:
        """Records rollouts of a step that broke before it was trained, with what became of each. A resume cuts them."""
        report = StepReport(
            stage=stage, step=step, version=0, loss=math.nan, metrics={}, seconds={}, system={}, groups_trained=0,
            groups_dropped=len(groups), max_staleness=0,
        )  # fmt: skip
        self._submit(lambda connection: _insert_rollouts(connection, report, groups))

    def flush(self, deadline_seconds: float = PATIENCE_SECONDS) -> None:
        """Returns when everything submitted so far is on disk.

        Call it before a checkpoint becomes visible: a checkpoint newer than run.db would resume with a hole.
        """
        deadline = time.monotonic() + deadline_seconds
        is_done = threading.Event()
        self._submit(lambda connection: is_done.set(), deadline_seconds)
        while not is_done.wait(timeout=0.05):
            self._check_writer(deadline, deadline_seconds)

    def rewind(self, stage: int, step: int) -> None:
        """Cuts the record of one stage back to the end of `step`, where its checkpoint was taken.

        0 keeps only what was measured before the first step, -1 keeps nothing. What a killed run recorded after its
        checkpoint will happen again, to the bit; kept, it would be there twice.
        """
        is_missing = threading.Event()

        def cut(connection: sqlite3.Connection) -> None:
            held = connection.execute("SELECT 1 FROM steps WHERE stage = ? AND step = ?", (stage, step)).fetchone()
            if step > 0 and not held:
                is_missing.set()
                return
            for table in STEP_TABLES:
                connection.execute(f"DELETE FROM {table} WHERE stage = ? AND step > ?", (stage, step))
            _drop_meta(connection, "finished")

        self._submit(cut)
        self.flush()
        if is_missing.is_set():
            raise BackendError(
                f"{self.folder / DATABASE} does not hold step {step} of stage {stage}, though there is a checkpoint of "
                "it: the file was replaced or damaged. Resume from an earlier checkpoint, or start a new run."
            )

    def close(self, deadline_seconds: float = 60.0) -> None:
        """Writes what is left and lets go of the directory. Raises what the writer met, unless that was raised before:
        what broke the run matters more than what its record met while closing."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._failure is None:
                self.flush(deadline_seconds)
                self._jobs.put(None, timeout=deadline_seconds)
                self._writer.join(timeout=deadline_seconds)
            elif not self._is_reported:
                self._raise_failure()
        finally:
            if self._failure is not None:
                self._writer.join(timeout=5.0)  # it noted its failure and is about to end
            if not self._writer.is_alive():  # a stuck writer keeps both until the process ends
                with suppress(sqlite3.Error):
                    self._connection.close()
                self._lock.release()

    def _write(self) -> None:
        """The writer thread. Ends at the first failure or at None."""
        beaten = -math.inf
        while True:
            job: Job | None
            if time.monotonic() - beaten >= BEAT_SECONDS:
                job, beaten = _beat, time.monotonic()
            else:
                try:
                    job = self._jobs.get(timeout=1.0)
                except queue.Empty:
                    continue
            if job is None:
                return
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                job(self._connection)
                self._connection.execute("COMMIT")
            except BaseException as error:
                with suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                self._failure = error
                return
            del job  # not while waiting for the next: it holds a whole batch

    def _submit(self, job: Job, deadline_seconds: float = PATIENCE_SECONDS) -> None:
        deadline = time.monotonic() + deadline_seconds
        while True:
            self._check_writer(deadline, deadline_seconds)
            try:
                self._jobs.put(job, timeout=0.05)
                return
            except queue.Full:
                continue

    def _check_writer(self, deadline: float, deadline_seconds: float) -> None:
        if self._failure is not None:
            self._raise_failure()
        if not self._writer.is_alive():
            raise BackendError(f"the store of {self.folder} is closed; nothing more can be recorded")
        if time.monotonic() > deadline:
            raise BackendError(f"{self.folder / DATABASE}: the disk has not kept up for {deadline_seconds:g} s")

    def _raise_failure(self) -> None:
        assert self._failure is not None, "raised only after a failure"
        self._is_reported = True
        raise _as_temper_error(self._failure, self.folder) from self._failure


def _insert_step(connection: sqlite3.Connection, report: StepReport, batch: Batch, transcript_bytes: float) -> None:
    groups = encode.outcomes(batch)
    _insert(connection, "steps", [encode.step_row(report, batch)])
    _insert(connection, "metrics", encode.named_rows(report, {**report.metrics, **report.system}))
    _insert(connection, "seconds", encode.named_rows(report, report.seconds))
    _insert(connection, "loads", encode.load_rows(report))
    _insert(connection, "ledger", encode.ledger_rows(report, batch))
    _insert(connection, "prompts", encode.prompt_rows(report, batch))
    trained = {(sample.group_id, sample.index) for update in batch.updates for sample in update}
    _insert_rollouts(connection, report, groups, trained)
    if groups:
        _insert(connection, "token_rows", encode.trained_rows(report, batch))
        limit_transcripts(connection, report.stage, report.step, transcript_bytes)


def _insert_rollouts(
    connection: sqlite3.Connection,
    report: StepReport,
    groups: Sequence[tuple[Group, str]],
    trained: Collection[tuple[str, int]] = (),
) -> None:
    """Groups with their outcomes, and the tokens of members that are not `trained`."""
    members = [member for group, _ in groups for member in group.trajectories]
    left_out = [member for member in members if (member.group_id, member.index) not in trained]
    _insert(connection, "groups", (encode.group_row(report, group, outcome) for group, outcome in groups))
    _insert(connection, "trajectories", (encode.trajectory_row(report, member) for member in members))
    _insert(connection, "token_rows", (row for member in left_out for row in encode.untrained_rows(report, member)))


def _beat(connection: sqlite3.Connection) -> None:
    _insert(connection, "meta", [heartbeat_row()], replace=True)


def _drop_meta(connection: sqlite3.Connection, name: str) -> None:
    connection.execute("DELETE FROM meta WHERE name = ?", (name,))


def _insert(
    connection: sqlite3.Connection, table: str, rows: Iterable[encode.Row], conflict: str = "", *, replace: bool = False
) -> None:
    """Inserts rows that have every column of the table, in its order."""
    width = len(connection.execute(f"SELECT * FROM {table} LIMIT 0").description)
    verb = "INSERT OR REPLACE" if replace else "INSERT"
    # The one place where anything enters the database: what a model, an environment or a reward says must not fail.
    storables = (tuple(map(storable, row)) for row in rows)
    connection.executemany(f"{verb} INTO {table} VALUES ({', '.join('?' * width)}) {conflict}", storables)


def _as_temper_error(error: BaseException, folder: Path) -> TemperError:
    """Whose fault it is: a full disk is the user's to mend, anything else is a broken part."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    # Some full disks show as an input/output error, when it is the shared-memory file that cannot grow.
    is_crammed = code == sqlite3.SQLITE_IOERR and shutil.disk_usage(folder).free < 1 << 20
    if code == sqlite3.SQLITE_FULL or is_crammed or is_disk_full(error):
        return DiskFull(f"disk full while writing {folder / DATABASE}")
    if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return BackendError(f"{folder / DATABASE} is damaged ({error}). Restore it from a copy, or start a new run.")
    return BackendError(f"{folder / DATABASE} could not be written: {type(error).__name__}: {error}")
