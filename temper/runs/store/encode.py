"""What one training step leaves in run.db, as plain rows. Pure: data types in, tuples out.

Supervised rows are not copied: they are in the user's data and nothing was drawn. Their prompts are in the ledger.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from temper.runs.records import AlarmRecord, AuditRecord, EffectRecord, VerdictRecord
from temper.runs.store.arrays import ARRAY_TYPES, PLANES, pack_array, pack_loads
from temper.runs.store.nulls import number
from temper.storable import to_json
from temper.types import (
    Batch,
    EvaluationResult,
    Group,
    Message,
    Sample,
    Score,
    StepReport,
    Trace,
    Trajectory,
    array_of,
)

Row = tuple[Any, ...]
TRAINED = "trained"


def step_row(report: StepReport, batch: Batch) -> Row:
    drawn = sum(group.tokens_drawn for group, _ in outcomes(batch))
    trained = sum(sample.num_actions for update in batch.updates for sample in update)
    counts = (report.groups_trained, report.groups_dropped, report.max_staleness)
    return (report.stage, report.step, report.version, number(report.loss), *counts, drawn, trained)


def named_rows(report: StepReport, values: Mapping[str, float]) -> list[Row]:
    """For the tables metrics and seconds."""
    return [(report.stage, report.step, name, number(value)) for name, value in values.items()]


def outcomes(batch: Batch) -> list[tuple[Group, str]]:
    """Every group of the step in draw order, with what became of it."""
    pairs = [(group, TRAINED) for group in batch.groups]
    pairs += [(group, f"dropped:{reason}") for group, reason in batch.dropped]
    return sorted(pairs, key=lambda pair: pair[0].draw)


def ledger_rows(report: StepReport, batch: Batch) -> Iterator[Row]:
    """Which prompts the step consumed. Supervised rows are named "<task id>#<draw>"."""
    groups = outcomes(batch)
    entries: list[tuple[int | None, str, str, str]]
    entries = [(group.draw, group.task.id, group.id, outcome) for group, outcome in groups]
    if not groups:
        names = dict.fromkeys(sample.group_id for update in batch.updates for sample in update)
        entries = [(*_split_name(name), name, TRAINED) for name in names]
    for place, entry in enumerate(entries):
        yield (report.stage, report.step, place, *entry)


def prompt_rows(report: StepReport, batch: Batch) -> list[Row]:
    """Histories of the prompts that the step consumed, after it."""
    place = (report.stage, report.step)
    return [
        (place[0], one.task_id, place[1], one.source, one.draws, one.attempts, one.passed, one.rate)
        for one in batch.histories
    ]


def _split_name(name: str) -> tuple[int | None, str]:
    task_id, _, draw = name.rpartition("#")
    return (int(draw), task_id) if task_id and draw.isdecimal() else (None, name)


def load_rows(report: StepReport) -> list[Row]:
    """One row, or none where no routers were seen."""
    if not report.loads:
        return []
    return [(report.stage, report.step, to_json(list(report.loads)), pack_loads(list(report.loads.values())))]


def group_row(report: StepReport, group: Group, outcome: str) -> Row:
    prompt = _messages(group.task.messages)
    return (report.stage, report.step, group.id, group.draw, group.task.id, prompt, group.task.answer, outcome)


def trajectory_row(report: StepReport, trajectory: Trajectory) -> Row:
    score = trajectory.score
    parts = to_json({name: _score(part) for name, part in trajectory.score_parts.items()})
    weighted = to_json({name: _score(part) for name, part in trajectory.weighted_parts.items()})
    said = [message for turn in trajectory.turns for message in (turn.message, *turn.replies)]
    return (
        report.stage,
        report.step,
        trajectory.group_id,
        trajectory.index,
        trajectory.status.value,
        score.kind.value,
        None if score.value is None else number(score.value),
        score.reason,
        parts,
        weighted,
        trajectory.text,
        _messages(said) if len(said) > 1 else None,
        trajectory.turns[-1].completion.finish.value if trajectory.turns else None,
        trajectory.num_tokens,
        trajectory.error,
        trajectory.seconds,
        _events(trajectory),
        to_json([number(reward) for reward in trajectory.turn_rewards]) if trajectory.turn_rewards else None,
    )


def trained_rows(report: StepReport, batch: Batch) -> Iterator[Row]:
    """Token arrays of what was trained. A rollout trained in several updates is stored once, from its first."""
    traces = report.traces or {}
    seen: set[tuple[str, int]] = set()
    for update in batch.updates:
        rows: dict[tuple[str, int], int] = {}
        for sample in update:
            key = (sample.group_id, sample.index)
            if key in seen:
                continue
            rows[key] = rows.get(key, -1) + 1
            name = (*key, rows[key])
            yield (report.stage, report.step, *name, *_sample_arrays(sample, traces.get(name)))
        seen |= rows.keys()


def untrained_rows(report: StepReport, trajectory: Trajectory) -> Iterator[Row]:
    """Token arrays of a rollout that was not trained: one row per turn, without credit."""
    for row, turn in enumerate(trajectory.turns):
        completion = turn.completion
        size = len(completion.prompt_ids)
        arrays = {
            "token_ids": np.concatenate((np.array(completion.prompt_ids, np.int32), array_of(completion.token_ids))),
            "loss_mask": np.concatenate((np.zeros(size, np.uint8), completion.loss_mask)),
            "behavior_logprobs": np.concatenate((np.zeros(size), array_of(completion.logprobs))),
            "versions": np.concatenate((np.full(size, -1), array_of(completion.versions))),
        }
        if completion.entropies is not None:
            arrays["entropies"] = np.concatenate((np.zeros(size), array_of(completion.entropies)))
        yield (report.stage, report.step, trajectory.group_id, trajectory.index, row, *_arrays(arrays))


def evaluation_row(result: EvaluationResult) -> Row:
    budget = to_json(dict(result.budget))
    scores = (number(result.score), number(result.low), number(result.high))
    sizes = (result.num_prompts, result.samples_per_prompt)
    texts = (budget, to_json(dict(result.details)) if result.details else None)
    return (result.stage, result.step, result.name, *scores, *sizes, number(result.constant_score), *texts)


def audit_row(audit: AuditRecord) -> Row:
    name = (audit.stage, audit.step, audit.evaluation, audit.place, audit.kind, audit.task_id)
    scores = (None if score is None else number(score) for score in (audit.reward, audit.heldout))
    return (*name, _messages(audit.prompt), audit.text, *scores)


def effect_row(effect: EffectRecord) -> Row:
    name = (effect.stage, effect.step, effect.evaluation, effect.place, effect.task_id, effect.member)
    return (*name, effect.turn, effect.kind.value, effect.name, effect.detail)


def alarm_row(alarm: AlarmRecord) -> Row:
    value = None if alarm.value is None else number(alarm.value)
    what = (alarm.text, alarm.meaning, alarm.advice)
    return (alarm.stage, alarm.step, alarm.time, alarm.rule, alarm.level, value, *what)


def verdict_row(verdict: VerdictRecord) -> Row:
    name = (verdict.stage, verdict.step, verdict.part, verdict.task_id, verdict.group_id, verdict.member)
    outcome = (verdict.kind, None if verdict.value is None else number(verdict.value), verdict.reason)
    return (*name, *outcome, verdict.fingerprint, to_json(dict(verdict.detail)) if verdict.detail else None)


def _sample_arrays(sample: Sample, trace: Trace | None) -> Row:
    """trace: what the trainer found when it trained the row; None: it kept nothing."""
    columns: dict[str, Sequence[float] | None] = {
        "token_ids": sample.token_ids,
        "loss_mask": sample.loss_mask,
        "behavior_logprobs": sample.behavior_logprobs,
        "versions": sample.versions,
        "policy_logprobs": sample.proximal_logprobs if trace is None else trace.policy_logprobs,
        "advantages": sample.advantages,
        "weights": sample.weights,
        "entropies": None if trace is None else trace.entropies,
    }
    return _arrays({name: array_of(column) for name, column in columns.items() if column is not None})


def _arrays(arrays: Mapping[str, NDArray[Any]]) -> Row:
    """All array columns of a row and how they are packed; NULL for those that are not there."""
    packed = (pack_array(arrays[name], name) if name in arrays else None for name in ARRAY_TYPES)
    return (*packed, PLANES)


def _events(trajectory: Trajectory) -> str | None:
    """What its environment did, turn by turn, and then what stands in no turn, with null there; None when it reported
    nothing."""
    found = [
        {"turn": number, "kind": event.kind.value, "name": event.name, "detail": event.detail, "cost": event.cost}
        for number, event in trajectory.placed_events
    ]
    return to_json(found) if found else None


def _messages(messages: Sequence[Message]) -> str:
    return to_json([message.as_dict() for message in messages])


def _score(score: Score) -> float | str | None:
    """A part's value, or its reason when it has none."""
    return score.reason if score.value is None else number(score.value)
