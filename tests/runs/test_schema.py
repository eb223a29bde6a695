"""Layouts of run.db: an older one can be read, and only read."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from temper.errors import UserError
from temper.runs.reader import RunReader
from temper.runs.store import RunStore, open_run
from temper.types import Batch, EvaluationResult, StepReport

StepMaker = Callable[..., tuple[StepReport, Batch]]

TO_LAYOUT_2 = """
DROP TABLE audits;
DROP TABLE alarms;
ALTER TABLE token_rows DROP COLUMN entropies;
ALTER TABLE evaluations DROP COLUMN details;
UPDATE meta SET value = '2' WHERE name = 'schema';
"""


def change(folder: Path, script: str) -> None:
    connection = sqlite3.connect(folder / "run.db")
    connection.executescript(script)
    connection.close()


def test_a_run_of_layout_2_reads_as_if_it_had_no_audits_alarms_entropies_and_details(
    store: RunStore, make_step: StepMaker, make_evaluation: Callable[..., EvaluationResult]
) -> None:
    store.append(*make_step(1))
    result = make_evaluation(1, 0.5)
    store.evaluation(result)
    store.close()
    with RunReader(store.folder) as reader:
        before = reader.fingerprint()
    change(store.folder, TO_LAYOUT_2)
    content = (store.folder / "run.db").read_bytes()
    with RunReader(store.folder) as reader:
        assert reader.fingerprint() == before
        assert reader.evaluations() == [result]
        assert (reader.audits(), reader.alarms()) == ([], [])
        first, *_ = reader.trajectories(0, 1)
        assert first.rows[0].entropies is None
        assert first.rows[0].weights is not None
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            reader.query("DELETE FROM meta")
    assert (store.folder / "run.db").read_bytes() == content, "reading changes nothing"


def test_a_run_of_layout_2_cannot_be_gone_on_with_and_the_message_says_what_can_be_done(store: RunStore) -> None:
    store.close()
    change(store.folder, TO_LAYOUT_2)
    with pytest.raises(UserError, match=r"has layout 2 .* writes layout 3\. Finish the run with the version") as caught:
        open_run(store.folder, config="", resume=True)
    assert "with another --run" in str(caught.value)
    change(store.folder, "UPDATE meta SET value = '3'")  # the planted fault: it says 3 and is not
    with RunReader(store.folder) as reader, pytest.raises(sqlite3.OperationalError, match="no such table: audits"):
        reader.audits()


def test_a_layout_of_the_future_is_neither_read_nor_written(store: RunStore) -> None:
    store.close()
    change(store.folder, "UPDATE meta SET value = '4'")
    for attempt in (RunReader, lambda folder: open_run(folder, config="", resume=True)):
        with pytest.raises(UserError, match="has layout 4; this version of Temper reads layout 3"):
            attempt(store.folder)
