"""Writing a run: completeness, durability, refusals."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from temper.errors import BackendError, UserError
from temper.runs.reader import RunReader
from temper.runs.records import AlarmRecord, AuditRecord, EffectRecord, VerdictRecord
from temper.runs.store import run_store as module
from temper.runs.store.run_store import RunStore, open_run
from temper.storable import storable_text, without_halves
from temper.types import (
    Batch,
    Completion,
    EvaluationResult,
    Event,
    EventKind,
    Finish,
    Group,
    Message,
    Sample,
    Score,
    ScoreKind,
    Status,
    StepReport,
    Task,
    Trace,
    Trajectory,
    Turn,
)

StepMaker = Callable[..., tuple[StepReport, Batch]]
EvaluationMaker = Callable[..., EvaluationResult]


def test_a_step_comes_back_with_every_token_and_both_log_probabilities(store: RunStore, make_step: StepMaker) -> None:
    store.append(*make_step(1))
    store.close()
    with RunReader(store.folder) as reader:
        (step,) = reader.steps()
        assert (step.tokens_drawn, step.tokens_trained, step.loss) == (12, 6, 0.5)
        first, second, dropped, failed = reader.trajectories(0, 1)
    assert first.rows[0].token_ids.tolist() == [5, 6, 7, 8, 0]
    assert first.rows[0].loss_mask.tolist() == [0, 0, 1, 1, 1]
    assert first.rows[0].versions.tolist() == [-1, -1, 3, 3, 4]
    assert first.rows[0].policy_logprobs is not None
    assert first.rows[0].policy_logprobs.tolist() == pytest.approx([0, 0, -0.11, -0.21, -0.31])
    assert second.rows[0].policy_logprobs is None
    assert second.rows[0].advantages is not None
    assert second.rows[0].advantages.tolist() == [0, 0, -1, -1, -1]
    assert (first.score, first.parts, first.outcome) == (1.0, {"exact": 1.0}, "trained")
    assert first.prompt[0].content == "1 + 1?"
    assert first.messages[0].content == first.text == "<b>answer</b> 0"
    assert (dropped.outcome, dropped.rows[0].advantages) == ("dropped:degenerate", None)
    assert dropped.rows[0].behavior_logprobs.tolist() == pytest.approx([0, 0, -0.1, -0.2, -0.3])
    assert (failed.score, failed.score_kind, failed.reason) == (None, "error", "verifier timed out")


def test_traces_of_the_trainer_go_to_their_rows_and_the_rest_keeps_what_it_had(
    store: RunStore, make_step: StepMaker
) -> None:
    report, batch = make_step(1)
    group = batch.groups[0].id
    forked = (batch.updates[0][0], *batch.updates[0])  # the first rollout now has two rows
    entropies = [0.0, 0.0, 1.5, 0.5, 0.25]
    nothing = Trace(policy_logprobs=[0.0] * 5, entropies=[0.0] * 5)
    trace = Trace(policy_logprobs=[0.0, 0.0, -1.0, -2.0, -3.0], entropies=entropies)
    traced = dataclasses.replace(report, traces={(group, 0, 1): trace, (group, 1, 0): nothing})
    store.append(traced, dataclasses.replace(batch, updates=(forked,)))
    store.close()
    with RunReader(store.folder) as reader:
        first, second, dropped, _ = reader.trajectories(0, 1)
    untraced, row = first.rows
    assert untraced.entropies is None
    assert untraced.policy_logprobs is not None
    assert untraced.policy_logprobs.tolist() == pytest.approx([0, 0, -0.11, -0.21, -0.31]), "the sample's own"
    assert row.entropies is not None
    assert row.entropies.tolist() == entropies
    assert row.policy_logprobs is not None
    assert row.policy_logprobs.tolist() == [0, 0, -1, -2, -3]
    assert second.rows[0].policy_logprobs is not None
    assert dropped.rows[0].entropies is None


def make_audit(step: int, place: int = 0, stage: int = 0, **changes: Any) -> AuditRecord:
    prompt = (Message(role="user", content="1 + 1?"),)
    made = AuditRecord(
        stage=stage, step=step, evaluation="greedy", kind="top", place=place, task_id=f"heldout:{place}", prompt=prompt,
        text="<script>alert(1)</script>", reward=1.0, heldout=0.0,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def make_effect(step: int, place: int = 0, stage: int = 0) -> EffectRecord:
    return EffectRecord(
        stage=stage, step=step, evaluation="greedy", place=place, task_id="heldout:0", member=0, turn=place,
        kind=EventKind.SIDE_EFFECT, name="pay", detail="done: pay()",
    )  # fmt: skip


def make_alarm(step: int, stage: int = 0, **changes: Any) -> AlarmRecord:
    made = AlarmRecord(
        stage=stage, step=step, time=float(step), rule="kl_spike", level="warn", value=3.0, text="KL is 3",
        meaning="too fast", advice="go slower",
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def test_audits_and_alarms_come_back_as_they_were_and_repeat_without_doubling(store: RunStore) -> None:
    audits = [make_audit(1), make_audit(1, 1, reward=None, heldout=math.inf), make_audit(1, kind="random")]
    alarms = [make_alarm(1), make_alarm(1, time=0.5, rule="length"), make_alarm(2, value=None)]
    for _ in range(2):
        store.audit(audits)
        for alarm in alarms:
            store.alarm(alarm)
    store.alarm(make_alarm(3, value=math.nan))
    store.close()
    with RunReader(store.folder) as reader:
        assert reader.audits() == [audits[2], audits[0], audits[1]]
        assert reader.alarms() == [alarms[1], alarms[0], alarms[2], make_alarm(3, value=None)]


def test_the_fingerprint_holds_audits_and_no_alarms_because_those_may_come_from_clocks(tmp_path: Path) -> None:
    prints = []
    for number, text in enumerate(("a", "b", "a")):
        store = open_run(tmp_path / str(number), config="", resume=False)
        store.audit([make_audit(1, text=text)])
        store.alarm(make_alarm(1, value=float(number)))
        store.close()
        with RunReader(store.folder) as reader:
            prints.append(reader.fingerprint())
    assert prints[0] == prints[2] != prints[1]


def test_a_metric_that_is_not_a_number_is_null_and_infinity_stays(store: RunStore, make_step: StepMaker) -> None:
    store.append(*make_step(1, **{"a/nan": math.nan, "a/inf": math.inf, "a/third": 1 / 3}))
    store.close()
    with RunReader(store.folder) as reader:
        found = reader.metrics_at(0, 1)
    assert found["a/nan"] is None
    assert found["a/inf"] == math.inf
    assert found["a/third"] == 1 / 3, "metrics keep every bit"


def test_supervised_steps_leave_their_prompts_in_the_ledger_and_no_rollouts(
    store: RunStore, make_step: StepMaker
) -> None:
    sample = Sample(
        group_id="train.jsonl:4#17", index=0, token_ids=[1, 2], loss_mask=[0, 1], behavior_logprobs=[0.0, 0.0],
        versions=[-1, -1], advantages=[0.0, 1.0], weights=[0.0, 1.0],
    )  # fmt: skip
    report, _ = make_step(1)
    store.append(report, Batch(updates=((sample,),)))
    store.close()
    with RunReader(store.folder) as reader:
        (entry,) = reader.ledger()
        assert (entry.task_id, entry.draw, entry.outcome) == ("train.jsonl:4", 17, "trained")
        assert reader.trajectories(0, 1) == []
        assert reader.steps()[0].tokens_trained == 1


def test_a_rollout_trained_in_two_updates_is_stored_once_and_its_rows_are_kept_apart(
    store: RunStore, make_step: StepMaker
) -> None:
    report, batch = make_step(1)
    forked = (batch.updates[0][0], *batch.updates[0])  # the first rollout now has two rows
    store.append(report, Batch(updates=(forked, forked), groups=batch.groups, dropped=batch.dropped))
    store.close()
    with RunReader(store.folder) as reader:
        first, second, *_ = reader.trajectories(0, 1)
    assert (len(first.rows), len(second.rows)) == (2, 1)


def test_a_draw_consumed_twice_stops_the_run(store: RunStore, make_step: StepMaker) -> None:
    store.append(*make_step(1))
    report, _ = make_step(2)
    _, batch = make_step(1)
    store.append(report, batch)
    with pytest.raises(BackendError, match=r"UNIQUE constraint failed: ledger\.stage, ledger\.draw"):
        store.flush(10.0)
    store.close()
    with RunReader(store.folder) as reader:
        assert [step.step for step in reader.steps()] == [1], "the failed step left nothing behind"


def test_rewinding_and_repeating_equals_never_having_been_killed(
    tmp_path: Path, make_step: StepMaker, make_evaluation: EvaluationMaker
) -> None:
    def play(store: RunStore, stage: int, steps: range) -> None:
        for step in steps:
            store.append(*make_step(step, stage))
            store.evaluation(make_evaluation(step, step / 10, stage))
            effects = [make_effect(step, place, stage) for place in range(2)]
            store.audit([make_audit(step, place, stage) for place in range(2)], effects)
            store.alarm(make_alarm(step, stage))

    with_kill, without = (open_run(tmp_path / name, config="", resume=False) for name in ("killed", "whole"))
    play(without, 0, range(1, 6))
    play(without, 1, range(1, 4))
    play(with_kill, 0, range(1, 6))
    play(with_kill, 1, range(1, 3))
    with_kill.close()
    with_kill = open_run(tmp_path / "killed", config="", resume=True)
    with_kill.rewind(0, 4)
    with_kill.rewind(1, -1)
    with RunReader(with_kill.folder) as reader:
        for kept in (reader.audits(), reader.heldout_effects()):
            assert {(one.stage, one.step) for one in kept} == {(0, step) for step in range(1, 5)}
        assert [(alarm.stage, alarm.step) for alarm in reader.alarms()] == [(0, step) for step in range(1, 5)]
    play(with_kill, 0, range(5, 6))
    play(with_kill, 1, range(1, 4))
    with_kill.close()
    without.close()
    with RunReader(with_kill.folder) as one, RunReader(without.folder) as other:
        assert one.fingerprint() == other.fingerprint()
        assert one.ledger() == other.ledger()
        assert one.alarms() == other.alarms()
        assert len(one.audits()) == len(one.heldout_effects()) == 16


def test_the_fingerprint_notices_one_bit_and_ignores_clocks(tmp_path: Path, make_step: StepMaker) -> None:
    prints = []
    for name, metrics in (("a", {}), ("b", {"policy/entropy": math.nextafter(1 / 3, 1)}), ("c", {})):
        store = open_run(tmp_path / name, config="", resume=False)
        report, batch = make_step(1, **metrics)
        clocks = dataclasses.replace(report, seconds={"rollout": len(prints)}, system={"sys/kv_use": len(prints)})
        store.append(clocks, batch)
        store.close()
        with RunReader(store.folder) as reader:
            prints.append(reader.fingerprint())
    assert prints[0]["metrics"] != prints[1]["metrics"]
    assert prints[0] == prints[2]


def test_a_checkpoint_that_is_ahead_of_the_record_is_a_named_error(store: RunStore, make_step: StepMaker) -> None:
    store.append(*make_step(1))
    with pytest.raises(BackendError, match="does not hold step 2 of stage 0"):
        store.rewind(0, 2)
    store.close()


def test_a_finished_run_is_refused_without_resume_and_opens_with_it(store: RunStore, make_step: StepMaker) -> None:
    store.append(*make_step(1))
    store.finish()
    store.close()
    with pytest.raises(UserError, match=r"holds a finished run\. Pass --resume") as caught:
        open_run(store.folder, config="", resume=False)
    assert caught.value.exit_code == 2
    again = open_run(store.folder, config="steps = 5\n", resume=True)
    again.close()
    with RunReader(store.folder) as reader:
        assert reader.is_finished
        assert len(reader.steps()) == 1
        assert reader.events() == []


def test_folders_that_are_no_runs_are_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text.tex").write_text("x")
    for resume in (False, True):
        with pytest.raises(UserError, match=r"is not a run directory: it has no run.db but holds text.tex"):
            open_run(tmp_path / "thesis", config="", resume=resume)
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["text.tex"]
    with pytest.raises(UserError, match="no run to resume"):
        open_run(tmp_path / "absent", config="", resume=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        open_run(tmp_path / "file", config="", resume=False)


def test_a_database_of_something_else_and_a_damaged_one_are_named(tmp_path: Path) -> None:
    for name in ("other", "damaged"):
        (tmp_path / name).mkdir()
    other = sqlite3.connect(tmp_path / "other" / "run.db")
    other.execute("CREATE TABLE recipes (cake TEXT)")
    other.close()
    with pytest.raises(UserError, match="is not a run of Temper"):
        open_run(tmp_path / "other", config="", resume=True)
    (tmp_path / "damaged" / "run.db").write_bytes(b"SQLite format 3\0" + b"\xff" * 4096)
    with pytest.raises(BackendError, match="is damaged"):
        open_run(tmp_path / "damaged", config="", resume=True)


def test_resuming_with_another_configuration_is_recorded(store: RunStore) -> None:
    store.close()
    open_run(store.folder, config="steps = 9\n", resume=True).close()
    with RunReader(store.folder) as reader:
        (event,) = reader.events()
    assert "-steps = 5" in event.text
    assert "+steps = 9" in event.text
    assert (store.folder / "config.toml").read_text() == "steps = 9\n"


def test_a_full_disk_is_the_users_error_and_keeps_what_was_written(store: RunStore, make_step: StepMaker) -> None:
    store.append(*make_step(1))
    store.flush(10.0)
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count = {pages + 1}")

    def go_on() -> None:
        for step in range(2, 200):
            store.append(*make_step(step))

    with pytest.raises(UserError, match=r"disk full while writing .*run\.db") as caught:
        go_on()
    assert caught.value.exit_code == 2
    store.close()
    again = open_run(store.folder, config="steps = 5\n", resume=True)
    again.rewind(0, 1)
    again.append(*make_step(2))
    again.close()
    with RunReader(store.folder) as reader:
        assert [step.step for step in reader.steps()] == [1, 2]


def test_a_failure_that_nobody_asked_about_surfaces_when_the_run_closes(store: RunStore, make_step: StepMaker) -> None:
    store.append(*make_step(1))
    store.append(*make_step(1))
    with pytest.raises(BackendError, match="UNIQUE constraint failed: steps"):
        store.close()


def test_a_slow_disk_makes_append_wait_and_then_give_up(store: RunStore, make_step: StepMaker) -> None:
    gate = threading.Event()

    def hang(connection: sqlite3.Connection) -> None:
        gate.wait(30.0)

    store._submit(hang)
    time.sleep(0.05)  # the writer now holds the stuck job
    for step in range(1, module.QUEUE_STEPS + 1):
        store.append(*make_step(step))
    assert store._jobs.full(), "what waits is bounded"
    with pytest.raises(BackendError, match=r"has not kept up for 0\.2 s"):
        store.flush(0.2)
    gate.set()
    store.close()
    with RunReader(store.folder) as reader:
        assert len(reader.steps()) == module.QUEUE_STEPS, "nothing that was accepted is lost"


def test_nothing_can_be_recorded_after_close(store: RunStore, make_step: StepMaker) -> None:
    store.close()
    store.close()
    with pytest.raises(BackendError, match="is closed"):
        store.append(*make_step(1))


def test_two_writers_are_refused_and_a_killed_one_leaves_the_run_free(tmp_path: Path) -> None:
    # The child forks a grandchild that outlives it, as a verifier worker would.
    script = (
        "import os, sys, time; from pathlib import Path; from temper.runs.store.run_store import open_run\n"
        f"store = open_run(Path({str(tmp_path / 'run')!r}), config='', resume=False)\n"
        "store.event('note', 'hello'); store.flush()\n"
        "child = os.fork()\n"
        "if not child: print(os.getpid(), flush=True)\n"  # it has let go of the lock by then
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    grandchild = int(process.stdout.readline())
    try:
        with pytest.raises(UserError, match=f"is being written by process {process.pid}"):
            open_run(tmp_path / "run", config="", resume=True)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30.0)
        with RunReader(tmp_path / "run") as reader:  # a leftover WAL does not disturb a reader
            assert reader.events()[0].text == "hello"
        store = open_run(tmp_path / "run", config="", resume=True)
        store.close()
    finally:
        os.kill(grandchild, signal.SIGKILL)
        process.kill()
        process.stdout.close()


def test_a_run_killed_before_its_first_write_can_be_started_or_resumed(tmp_path: Path) -> None:
    for resume in (False, True):
        folder = tmp_path / f"run-{resume}"
        folder.mkdir()
        (folder / "run.lock").write_text("123\n")
        (folder / "config.toml.new").write_text("half")
        open_run(folder, config="", resume=resume).close()


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=12)
ANY_NUMBER = st.one_of(st.floats(), st.integers(), st.sampled_from([400, 5000]).map(lambda digits: -(10**digits)))


def hostile_step(text: str, figure: Any) -> tuple[StepReport, Batch]:
    """One group in which everything that was said is `text` and everything that was counted is `figure`."""
    message = Message(role="assistant", content=text, name=text)
    event = Event(kind=EventKind.TOOL_CALL, name=text, detail=text, cost=figure)
    completion = Completion(prompt_ids=(5,), token_ids=[7], logprobs=[-0.1], versions=[3], finish=Finish.STOP)
    turn = Turn(completion=completion, message=message, replies=(message,), reward=figure, events=(event,))
    parts = {f"part {text}": Score.error(text), "paid": Score(kind=ScoreKind.VALUE, value=figure)}
    member = Trajectory(
        task_id="t", group_id=f"g{text}", index=0, turns=(turn,), status=Status.TOOL_ERROR, score=Score.error(text),
        score_parts=parts, weighted_parts=parts, turn_rewards=(figure,), error=text,
    )  # fmt: skip
    task = Task(id=f"t{text}", messages=(Message(role="user", content=text),), answer=text)
    group = Group(id=f"g{text}", draw=0, task=task, trajectories=(member,))
    report = StepReport(
        stage=0, step=1, version=1, loss=figure, metrics={f"m{text}": figure}, seconds={f"s{text}": figure}, system={},
        groups_trained=0, groups_dropped=1, max_staleness=0,
    )  # fmt: skip
    return report, Batch(updates=(), groups=(), dropped=((group, text),))


@settings(max_examples=25)
@given(ANY_TEXT, ANY_NUMBER)
def test_nothing_that_was_said_or_counted_fails_to_be_stored(
    tmp_path_factory: pytest.TempPathFactory, text: str, figure: Any
) -> None:
    store = open_run(tmp_path_factory.mktemp("hostile") / "run", config="", resume=False)
    store.begin_stage(0, text, 1)
    store.append(*hostile_step(text, figure))
    store.event("warning", text)
    store.alarm(make_alarm(1, rule=f"r{text}", text=text, meaning=text, advice=text, value=figure))
    store.audit([make_audit(1, text=text, prompt=(Message(role="user", content=text),), reward=figure)])
    detail: dict[str, Any] = {f"k{text}": text, "n": figure, "deep": {1: [object()]}}
    store.verdicts([
        VerdictRecord(stage=0, step=1, part=text, task_id=text, group_id=text, member=0, kind="value", value=figure,
                      reason=text, fingerprint=text, detail=detail)
    ])  # fmt: skip
    store.evaluation(
        EvaluationResult(stage=0, step=1, name=f"e{text}", score=figure, low=figure, high=figure, num_prompts=1,
                         samples_per_prompt=1, constant_score=figure, budget={"b": text}, details={"d": figure})
    )  # fmt: skip
    store.close()
    with RunReader(store.folder) as reader:
        (read,) = reader.trajectories(0, 1)
        assert read.error == read.reason == read.text == storable_text(text)
        said = [m.content for m in read.messages]
        assert said == [without_halves(text)] * 2
        json.dumps([read.parts, read.weighted, read.events, said], ensure_ascii=False).encode()
        lists = (reader.alarms(), reader.audits(), reader.verdicts(0, 1), reader.evaluations())
        assert [len(found) for found in lists] == [1, 1, 1, 1]


def test_every_column_of_text_takes_any_text(tmp_path: Path) -> None:
    """A guard for columns to come: all of them are written through one place."""
    store = open_run(tmp_path / "run", config="", resume=False)
    store.close()
    hostile = "\ud800 \x00 é"
    connection = sqlite3.connect(store.folder / module.DATABASE)
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    assert len(tables) > 10
    for table in tables:
        columns = connection.execute(f"PRAGMA table_info({table})").fetchall()
        row = [hostile if kind == "TEXT" else b"" if kind == "BLOB" else 10**400 if kind == "REAL" else 7
               for _, _, kind, *_ in columns]  # fmt: skip
        module._insert(connection, table, [tuple(row)])
        written = [value for found in connection.execute(f"SELECT * FROM {table}") for value in found]
        assert written.count(storable_text(hostile)) == row.count(hostile)
    connection.close()
