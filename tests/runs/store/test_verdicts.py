"""What judges said is in run.db, once, with the step that consumed it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from temper.runs.reader import RunReader
from temper.runs.records import VerdictRecord
from temper.runs.store import verdicts as module
from temper.runs.store.run_store import RunStore, open_run
from temper.runs.store.verdicts import Verdicts
from temper.types import Batch, EvaluationResult, Group, StepReport, Task

StepMaker = Callable[..., tuple[StepReport, Batch]]


def record(group: str, index: int, value: float | None = 1.0, *, task: str = "t", **detail: Any) -> dict[str, Any]:
    outcome = {"kind": "unscorable", "reason": "silent"} if value is None else {"kind": "value", "value": value}
    return {"task": task, "group": group, "index": index, **outcome, "fingerprint": "abc", **detail}


class Log:
    """What was said since it was last asked."""

    def __init__(self) -> None:
        self.said: dict[str, list[Mapping[str, Any]]] = {}

    def say(self, *records: Mapping[str, Any], part: str = "judge") -> None:
        self.said.setdefault(part, []).extend(records)

    def take(self) -> dict[str, list[Mapping[str, Any]]]:
        said, self.said = self.said, {}
        return said


def batch_of(*draws: int, dropped: Sequence[int] = ()) -> Batch:
    made = {
        draw: Group(id=f"t#{draw}", draw=draw, task=Task(id="t", messages=()), trajectories=())
        for draw in (*draws, *dropped)
    }
    return Batch(
        updates=(),
        groups=tuple(made[draw] for draw in draws),
        dropped=tuple((made[draw], "degenerate") for draw in dropped),
    )


def test_a_verdict_comes_back_as_it_was(store: RunStore) -> None:
    said = [
        VerdictRecord(
            stage=0, step=2, part="judge", task_id="t", group_id="t#1", member=3, kind="value", value=0.7, reason=None,
            fingerprint="abc", detail={"raw": 0.8, "criterion": "Is it <b>right</b>?", "step": 1},
        ),
        VerdictRecord(
            stage=0, step=2, part="judge", task_id="t", group_id="t#1", member=0, kind="error", value=None,
            reason="HTTP 500", fingerprint="abc",
        ),
    ]  # fmt: skip
    store.verdicts(said)
    store.close()
    with RunReader(store.folder) as reader:
        assert reader.verdicts(0, 2) == said
        assert reader.verdicts(0, 1) == []


def test_a_rewind_cuts_verdicts_with_their_steps(store: RunStore, make_step: StepMaker) -> None:
    log = Log()
    recorder = Verdicts(log.take, store.verdicts)
    for step in (1, 2, 3):
        report, batch = make_step(step)
        log.say(*(record(group.id, 0, step / 10, task=group.id) for group in batch.groups))
        store.append(report, batch)
        recorder.append(report, batch)
    store.rewind(0, 2)
    store.close()
    with RunReader(store.folder) as reader:
        assert [[verdict.value for verdict in reader.verdicts(0, step)] for step in (1, 2, 3)] == [[0.1], [0.2], []]


def test_verdicts_wait_for_the_step_that_consumes_their_group(make_step: StepMaker) -> None:
    written: list[VerdictRecord] = []
    log = Log()
    recorder = Verdicts(log.take, written.extend)
    log.say(record("t#2", 1), record("t#0", 1), record("t#0", 0, None), record("t#1", 0))
    recorder.append(make_step(1)[0], batch_of(0, dropped=[1]))
    assert [(v.step, v.group_id, v.member) for v in written] == [(1, "t#0", 0), (1, "t#0", 1), (1, "t#1", 0)]
    written.clear()
    log.say(record("t#3", 0), record("t#2", 0))
    recorder.append(make_step(2)[0], batch_of(2))
    assert [(v.step, v.group_id, v.member) for v in written] == [(2, "t#2", 0), (2, "t#2", 1)]
    assert log.said == {}, "nothing stays in the judge's memory"


def test_order_of_arrival_does_not_show(make_step: StepMaker) -> None:
    said = [record("t#10", 0), record("t#9", 0), record("t#9", 1), record("t#10", 1)]
    orders = []
    for arrived in (said, said[::-1]):
        written: list[VerdictRecord] = []
        log = Log()
        log.say(*arrived)
        Verdicts(log.take, written.extend).append(make_step(1)[0], batch_of(9, 10))
        orders.append([(v.group_id, v.member) for v in written])
    assert orders[0] == orders[1] == [("t#9", 0), ("t#9", 1), ("t#10", 0), ("t#10", 1)]


def test_an_evaluation_is_written_at_once_and_takes_no_rollout_with_it(
    make_evaluation: Callable[..., EvaluationResult],
) -> None:
    written: list[VerdictRecord] = []
    log = Log()
    recorder = Verdicts(log.take, written.extend)
    log.say(record("t#7", 0), record("t", 0, task="t"), record("labelled", 4, task="cases.jsonl:4"))
    log.say(record("t", 0), part="heldout/judge")
    recorder.evaluation(make_evaluation(3, 0.5))
    recorder.evaluation(make_evaluation(3, 0.5, name="sampled"))
    assert [(v.step, v.part, v.group_id) for v in written] == [
        (3, "heldout/judge", "t"), (3, "judge", "labelled"), (3, "judge", "t"),
    ]  # fmt: skip


def test_a_trial_before_training_is_not_taken_for_a_rollout(make_step: StepMaker) -> None:
    written: list[VerdictRecord] = []
    log = Log()
    recorder = Verdicts(log.take, written.extend)
    log.say(record("t#0", 0, 0.25), record("parity/0/1/3", 0), record("labelled", 0))
    recorder.opened(0, 0)
    assert [(v.step, v.group_id) for v in written] == [(0, "parity"), (0, "parity/0/1/3"), (0, "labelled")]
    log.say(record("t#0", 0, 0.75))
    recorder.append(make_step(1)[0], batch_of(0))
    assert [v.value for v in written if v.group_id == "t#0"] == [0.75]


def test_what_waits_is_bounded(make_step: StepMaker, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    written: list[VerdictRecord] = []
    log = Log()
    recorder = Verdicts(log.take, written.extend)
    log.say(*(record(f"t#{draw}", 0) for draw in range(5)))
    recorder.append(make_step(1)[0], batch_of())
    recorder.append(make_step(2)[0], batch_of(*range(5)))
    assert [v.group_id for v in written] == ["t#2", "t#3", "t#4"]


def test_equal_rollouts_with_other_verdicts_have_another_fingerprint(tmp_path: Path, make_step: StepMaker) -> None:
    prints = []
    for name, value in (("a", 0.5), ("b", 0.5), ("c", 0.6)):
        store = open_run(tmp_path / name, config="", resume=False)
        log = Log()
        recorder = Verdicts(log.take, store.verdicts)
        log.say(record("labelled", 0, value + len(prints)))
        recorder.opened(0, 0)
        report, batch = make_step(1)
        log.say(record(batch.groups[0].id, 0, value, task="t"))
        store.append(report, batch)
        recorder.append(report, batch)
        store.close()
        with RunReader(store.folder) as reader:
            prints.append(reader.fingerprint()["verdicts"])
    assert prints[0] == prints[1] != prints[2]


def test_what_turns_earned_is_kept(store: RunStore, make_step: StepMaker) -> None:
    report, batch = make_step(1)
    first, *others = batch.groups[0].trajectories
    paid = replace(batch.groups[0], trajectories=(replace(first, turn_rewards=(0.25,)), *others))
    store.append(report, replace(batch, groups=(paid,)))
    store.close()
    with RunReader(store.folder) as reader:
        assert [t.turn_rewards for t in reader.trajectories(0, 1)] == [(0.25,), (), (), ()]
