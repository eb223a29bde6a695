"""Layouts of run.db: an older one can be read, and only read."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from temper.errors import UserError
from temper.runs.reader import RunReader
from temper.runs.records import EffectRecord
from temper.runs.store.arrays import ARRAY_TYPES, PLANES, unpack_array
from temper.runs.store.run_store import RunStore, open_run
from temper.types import Batch, EvaluationResult, EventKind, PromptHistory, StepReport

StepMaker = Callable[..., tuple[StepReport, Batch]]

TO_LAYOUT_7 = """
DROP TABLE heldout_effects;
UPDATE meta SET value = '7' WHERE name = 'schema';
"""
TO_LAYOUT_6 = f"""
{TO_LAYOUT_7}
DROP TABLE loads;
UPDATE meta SET value = '6' WHERE name = 'schema';
"""
TO_LAYOUT_5 = f"""
{TO_LAYOUT_6}
DROP TABLE prompts;
UPDATE meta SET value = '5' WHERE name = 'schema';
"""
TO_LAYOUT_4 = f"""
{TO_LAYOUT_5}
DROP TABLE transcripts;
ALTER TABLE token_rows DROP COLUMN codec;
UPDATE meta SET value = '4' WHERE name = 'schema';
"""
TO_LAYOUT_3 = f"""
{TO_LAYOUT_4}
DROP TABLE verdicts;
ALTER TABLE trajectories DROP COLUMN turn_rewards;
UPDATE meta SET value = '3' WHERE name = 'schema';
"""
TO_LAYOUT_2 = f"""
{TO_LAYOUT_3}
DROP TABLE audits;
DROP TABLE alarms;
ALTER TABLE token_rows DROP COLUMN entropies;
ALTER TABLE evaluations DROP COLUMN details;
UPDATE meta SET value = '2' WHERE name = 'schema';
"""


def change(folder: Path, script: str) -> None:
    """Runs a script; one that makes an older layout finds arrays as that layout holds them."""
    connection = sqlite3.connect(folder / "run.db")
    for name in ARRAY_TYPES if TO_LAYOUT_4 in script else ():
        connection.create_function("raw", 1, partial(raw, name))
        connection.execute(f"UPDATE token_rows SET {name} = raw({name})")
    connection.commit()
    connection.executescript(script)
    connection.close()


def raw(name: str, blob: bytes | None) -> bytes | None:
    return None if blob is None else unpack_array(blob, name, PLANES).tobytes()


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


def test_a_run_of_layout_4_reads_with_its_arrays_as_they_lie_there(store: RunStore, make_step: StepMaker) -> None:
    store.append(*make_step(1))
    store.close()
    with RunReader(store.folder) as reader:
        before, packed = reader.fingerprint(), reader.trajectories(0, 1)
    change(store.folder, TO_LAYOUT_4)
    content = (store.folder / "run.db").read_bytes()
    with RunReader(store.folder) as reader:
        assert reader.fingerprint() == before
        found = reader.trajectories(0, 1)
    assert [t.text for t in found] == [t.text for t in packed]
    assert found[0].rows[0].token_ids.tolist() == packed[0].rows[0].token_ids.tolist()
    assert (store.folder / "run.db").read_bytes() == content, "reading changes nothing"


def test_a_run_of_layout_5_reads_as_if_no_prompt_had_a_history(store: RunStore, make_step: StepMaker) -> None:
    report, batch = make_step(1)
    seen = PromptHistory(task_id="t", draws=1, attempts=4, passed=1.0, rate=0.25, last_step=1)
    store.append(report, replace(batch, histories=(seen,)))
    store.close()
    with RunReader(store.folder) as reader:
        assert [prompt.task_id for prompt in reader.prompts()] == ["t"]
    change(store.folder, TO_LAYOUT_5)
    with RunReader(store.folder) as reader:
        assert reader.prompts() == reader.prompt_history(0, "t") == []


def test_a_run_of_layout_7_reads_as_if_no_evaluation_had_changed_anything(
    store: RunStore, make_step: StepMaker
) -> None:
    store.append(*make_step(1))
    effect = EffectRecord(
        stage=0, step=1, evaluation="greedy", place=0, task_id="t", member=0, turn=None, kind=EventKind.DENIED,
        name="pay", detail="pay()",
    )  # fmt: skip
    store.audit([], [effect])
    store.close()
    with RunReader(store.folder) as reader:
        assert reader.heldout_effects() == [effect]
    change(store.folder, TO_LAYOUT_7)
    with RunReader(store.folder) as reader:
        assert reader.heldout_effects() == []


def test_a_run_of_layout_3_reads_as_if_nobody_had_judged_or_been_paid_by_turn(
    store: RunStore, make_step: StepMaker
) -> None:
    store.append(*make_step(1))
    store.close()
    with RunReader(store.folder) as reader:
        before = reader.fingerprint()
    change(store.folder, TO_LAYOUT_3)
    content = (store.folder / "run.db").read_bytes()
    with RunReader(store.folder) as reader:
        assert reader.fingerprint() == before
        assert reader.verdicts(0, 1) == []
        assert {t.turn_rewards for t in reader.trajectories(0, 1)} == {()}
    assert (store.folder / "run.db").read_bytes() == content, "reading changes nothing"


@pytest.mark.parametrize(
    ("layout", "script"),
    [
        ("2", TO_LAYOUT_2),
        ("3", TO_LAYOUT_3),
        ("4", TO_LAYOUT_4),
        ("5", TO_LAYOUT_5),
        ("6", TO_LAYOUT_6),
        ("7", TO_LAYOUT_7),
    ],
)
def test_an_older_run_cannot_be_gone_on_with_and_the_message_says_what_can_be_done(
    layout: str, script: str, store: RunStore
) -> None:
    store.close()
    change(store.folder, script)
    expected = rf"has layout {layout} .* writes layout 8\. Finish the run with the version"
    with pytest.raises(UserError, match=expected) as caught:
        open_run(store.folder, config="", resume=True)
    assert "with another --run" in str(caught.value)


def test_a_run_that_says_another_layout_than_it_has_is_not_read_as_empty(store: RunStore) -> None:
    store.close()
    change(store.folder, TO_LAYOUT_2)
    change(store.folder, "UPDATE meta SET value = '8' WHERE name = 'schema'")  # the planted fault: it says 8 and is not
    with RunReader(store.folder) as reader, pytest.raises(sqlite3.OperationalError, match="no such table: audits"):
        reader.audits()


def test_a_layout_of_the_future_is_neither_read_nor_written(store: RunStore) -> None:
    store.close()
    change(store.folder, "UPDATE meta SET value = '9' WHERE name = 'schema'")
    for attempt in (RunReader, lambda folder: open_run(folder, config="", resume=True)):
        with pytest.raises(UserError, match="has layout 9; this version of Temper reads layout 8"):
            attempt(store.folder)
