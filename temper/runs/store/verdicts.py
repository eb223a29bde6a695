"""What judges said, on its way from their memory to run.db.

Owns: which step a verdict belongs to. Refuses: asking judges (rewards/), and keeping what the store has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from temper.runs.records import VerdictRecord
from temper.types import Batch, EvaluationResult, StepReport

Said = tuple[str, Mapping[str, Any]]
"""A part of the reward, and one record of its protocols.VerdictLog."""
PARITY = "parity"
"""Group of what is tried before training, so that no trial is taken for a rollout of the same name."""
NAMED = ("task", "group", "index", "kind", "value", "reason", "fingerprint")
"""Keys of a record that are columns; all others are detail."""
MAX_WAITING = 100_000
"""Most verdicts that are kept for rollouts ahead of their step; older ones are forgotten."""


class Verdicts:
    """A recorder of the loop. A verdict is written with the step that consumes its group, so that a rewind cuts both.

    Rollouts that run ahead are judged before their step: their verdicts wait here, for as many groups as may be under
    way. After a crash they are judged again, because they are rolled again.
    """

    def __init__(
        self,
        take: Callable[[], Mapping[str, Sequence[Mapping[str, Any]]]],
        write: Callable[[Sequence[VerdictRecord]], None],
    ) -> None:
        """take: everything that was said since the last call, by part. write: RunStore.verdicts."""
        self._take = take
        self._write = write
        self._waiting: list[Said] = []

    def opened(self, stage: int, step: int) -> None:
        """Parity is proven and no rollout has begun: all that was said so far was said of trials."""
        trials = [
            (part, {**record, "group": PARITY} if _is_rollout(record) else record) for part, record in self._said()
        ]
        self._put(stage, step, trials)

    def append(self, report: StepReport, batch: Batch) -> None:
        everyone = (*batch.groups, *(group for group, _ in batch.dropped))
        self._record(report.stage, report.step, {group.id: group.draw for group in everyone})

    def evaluation(self, result: EvaluationResult) -> None:
        self._record(result.stage, result.step, {})

    def _record(self, stage: int, step: int, draws: Mapping[str, int]) -> None:
        """Writes what was said of these groups or of no group, by part, draw and member: order of arrival is chance."""
        settled: list[Said] = []
        ahead: list[Said] = []
        for part, record in [*self._waiting, *self._said()]:
            is_ahead = _is_rollout(record) and record["group"] not in draws
            (ahead if is_ahead else settled).append((part, record))
        self._waiting = ahead[-MAX_WAITING:]
        settled.sort(key=lambda one: (one[0], draws.get(one[1]["group"], -1), one[1]["group"], one[1]["index"]))
        self._put(stage, step, settled)

    def _said(self) -> list[Said]:
        return [(part, record) for part, records in self._take().items() for record in records]

    def _put(self, stage: int, step: int, said: Sequence[Said]) -> None:
        if said:
            self._write([_verdict(stage, step, part, record) for part, record in said])


def _is_rollout(record: Mapping[str, Any]) -> bool:
    """A rollout's group is named "<task>#<draw>"; an evaluation's as its task; the labelled set has its own name."""
    task, _, draw = record["group"].rpartition("#")
    return bool(task == record["task"] and draw.isdecimal())


def _verdict(stage: int, step: int, part: str, record: Mapping[str, Any]) -> VerdictRecord:
    return VerdictRecord(
        stage=stage,
        step=step,
        part=part,
        task_id=record["task"],
        group_id=record["group"],
        member=record["index"],
        kind=record["kind"],
        value=record.get("value"),
        reason=record.get("reason"),
        fingerprint=record.get("fingerprint", ""),
        detail={name: value for name, value in record.items() if name not in NAMED},
    )
