"""What a run achieved, from its directory alone: `temper report`.

Owns: the summary and how it reads as text and as JSON. A gain is shown only between scores taken under equal budgets.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from temper.runs.encode import TRAINED
from temper.runs.reader import LedgerEntry, RunReader, StepRecord
from temper.runs.sparkline import sparkline
from temper.types import EvaluationResult

WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreChange:
    """Held-out score at both ends of a stretch of training."""

    name: str
    first: EvaluationResult
    last: EvaluationResult
    differs: tuple[str, ...]
    """Parts of the budget that are not equal; with any, the two scores do not compare."""

    @property
    def gain(self) -> float | None:
        return None if self.differs else self.last.score - self.first.score


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a stretch of training cost."""

    num_steps: int
    seconds: Mapping[str, float]
    """By phase."""
    tokens_drawn: int
    tokens_trained: int
    prompts_trained: int
    """Distinct tasks."""
    groups_trained: int
    groups_dropped: Mapping[str, int]
    """By reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    stage: int
    name: str
    scores: tuple[ScoreChange, ...]
    work: Work
    reward: tuple[float | None, ...]
    """By step; empty for supervised training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    folder: str
    is_finished: bool
    scores: tuple[ScoreChange, ...]
    """First and last of the whole run."""
    work: Work
    stages: tuple[StageSummary, ...]
    heldout: Mapping[str, tuple[float, ...]]
    """Every held-out score in order, by name."""
    failures: Mapping[str, int]
    """Rollouts that broke or could not be scored, by reason."""
    checkpoint: str | None
    """The newest; None when there is none yet."""
    weights_sha256: str | None
    peak_memory_bytes: float | None
    """Most that was held at once, of the device or of the process; None before the first step."""


def make_report(folder: Path) -> Report:
    """Summarises a run, live or finished."""
    with RunReader(folder) as reader:
        steps, ledger, evaluations = reader.steps(), reader.ledger(), reader.evaluations()
        seconds, rewards = reader.seconds(), reader.metric("reward/mean")
        names = {record.stage: record.name for record in reader.stages()}
        numbers = sorted({record.stage for record in steps} | {result.stage for result in evaluations} | names.keys())
        failures, is_finished = reader.failures(), reader.is_finished
        memory = [point.value for point in reader.metric("sys/peak_memory_bytes") if point.value is not None]
    stages = tuple(
        StageSummary(
            stage=number,
            name=names.get(number, f"stage {number}"),
            scores=_changes(result for result in evaluations if result.stage == number),
            work=_work([s for s in steps if s.stage == number], [e for e in ledger if e.stage == number], seconds),
            reward=tuple(point.value for point in rewards if point.stage == number),
        )
        for number in numbers
    )
    checkpoint = newest_checkpoint(folder)
    return Report(
        folder=str(folder),
        is_finished=is_finished,
        scores=_changes(evaluations),
        work=_work(steps, ledger, seconds),
        stages=stages,
        heldout={name: tuple(r.score for r in evaluations if r.name == name) for name in _names(evaluations)},
        failures=failures,
        checkpoint=None if checkpoint is None else str(checkpoint.relative_to(folder)),
        weights_sha256=None if checkpoint is None else _sha256(checkpoint / WEIGHTS),
        peak_memory_bytes=max(memory, default=None),
    )


def newest_checkpoint(folder: Path) -> Path | None:
    """checkpoints/<stage>-<kind>/step-<n> of the last stage and step; unfinished ones bear other names."""
    found = [path.parent for path in (folder / "checkpoints").glob(f"*-*/step-*/{WEIGHTS}")]
    numbered = [(path.parent.name.partition("-")[0], path.name.removeprefix("step-"), path) for path in found]
    ordered = [(int(stage), int(step), path) for stage, step, path in numbered if (stage + step).isdecimal()]
    return max(ordered)[2] if ordered else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _names(evaluations: Iterable[EvaluationResult]) -> list[str]:
    return list(dict.fromkeys(result.name for result in evaluations))


def _changes(evaluations: Iterable[EvaluationResult]) -> tuple[ScoreChange, ...]:
    results = list(evaluations)
    changes = []
    for name in _names(results):
        first, *_, last = [result for result in results if result.name == name] * 2
        keys = sorted(first.budget.keys() | last.budget.keys())
        differs = tuple(key for key in keys if first.budget.get(key) != last.budget.get(key))
        changes.append(ScoreChange(name=name, first=first, last=last, differs=differs))
    return tuple(changes)


def _work(steps: Sequence[StepRecord], ledger: Sequence[LedgerEntry], seconds: Mapping[tuple[int, str], float]) -> Work:
    stages = {record.stage for record in steps}
    phases: dict[str, float] = {}
    for (stage, phase), total in seconds.items():
        if stage in stages:
            phases[phase] = phases.get(phase, 0.0) + total
    trained = [entry for entry in ledger if entry.outcome == TRAINED]
    dropped = Counter(entry.outcome.removeprefix("dropped:") for entry in ledger if entry.outcome != TRAINED)
    return Work(
        num_steps=len(steps),
        seconds=dict(sorted(phases.items(), key=lambda item: -item[1])),
        tokens_drawn=sum(record.tokens_drawn for record in steps),
        tokens_trained=sum(record.tokens_trained for record in steps),
        prompts_trained=len({entry.task_id for entry in trained}),
        groups_trained=len(trained),
        groups_dropped=dict(dropped.most_common()),
    )


def as_json(report: Report) -> str:
    """The whole report; gains and shares included, numbers that are not numbers as null."""
    value = dataclasses.asdict(report)
    for change, made in _pairs(report, value):
        made["gain"] = change.gain
    return json.dumps(_finite(value), indent=2, ensure_ascii=False)


def _pairs(report: Report, value: dict[str, Any]) -> Iterable[tuple[ScoreChange, dict[str, Any]]]:
    yield from zip(report.scores, value["scores"], strict=True)
    for stage, made in zip(report.stages, value["stages"], strict=True):
        yield from zip(stage.scores, made["scores"], strict=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def render(report: Report) -> str:
    """The report as text for a terminal."""
    state = "finished" if report.is_finished else "not finished"
    total = sum(report.work.seconds.values())
    lines = [f"{report.folder}: {state}, {report.work.num_steps} steps, {duration(total)}", ""]
    lines += _score_lines(report)
    lines += _curve_lines(report)
    lines += _work_lines(report)
    for reason, times in list(report.failures.items())[:5]:
        lines.append(f"  failed rollouts  {times:,} x {reason}")
    if report.checkpoint:
        lines += [
            "",
            f"  final weights    {report.checkpoint}/{WEIGHTS}",
            f"  sha256           {report.weights_sha256}",
        ]
    return "\n".join(lines)


def _score_lines(report: Report) -> list[str]:
    if not report.scores:
        return ["  no held-out scores yet"]
    lines = [f"  {'held-out score, 95% interval':<32}{'before':<26}{'after':<26}gain"]
    for change in report.scores:
        parts = [
            (f"{stage.name}", found) for stage in report.stages for found in stage.scores if found.name == change.name
        ]
        parts = parts if len(parts) > 1 else []
        for label, part in [*parts, ("whole run", change)]:
            gain = (
                f"not comparable: {', '.join(part.differs)}" if part.gain is None else f"{100 * part.gain:+.1f} points"
            )
            lines.append(f"  {change.name + ', ' + label:<32}{score(part.first):<26}{score(part.last):<26}{gain}")
    last = report.scores[0].last
    samples = ", ".join(f"{change.name} {change.last.samples_per_prompt} per prompt" for change in report.scores)
    lines.append(f"  {last.num_prompts} held-out prompts; {samples}")
    lines.append(f"  always giving the commonest answer scores {100 * last.constant_score:.1f}%")
    return lines


def score(result: EvaluationResult) -> str:
    """'56.2% [51.8, 60.5]'."""
    return f"{100 * result.score:.1f}% [{100 * result.low:.1f}, {100 * result.high:.1f}]"


def _curve_lines(report: Report) -> list[str]:
    lines = [""]
    for stage in report.stages:
        known = [value for value in stage.reward if value is not None]
        if known:
            lines.append(f"  reward, {stage.name:<9}{known[0]:.3f} {sparkline(stage.reward)} {known[-1]:.3f}")
    for name, values in report.heldout.items():
        if len(values) > 1:
            lines.append(f"  {name:<17}{values[0]:.3f} {sparkline(values)} {values[-1]:.3f}")
    return [*lines, ""] if len(lines) > 1 else lines


def _work_lines(report: Report) -> list[str]:
    work, total = report.work, sum(report.work.seconds.values()) or 1.0
    shares = ", ".join(
        f"{name} {seconds / total:.0%}" for name, seconds in work.seconds.items() if seconds >= total / 200
    )
    lines = [
        f"  tokens           {work.tokens_drawn:,} drawn, {work.tokens_trained:,} trained",
        f"  prompts          {work.prompts_trained:,} distinct, trained {work.groups_trained:,} times",
        f"  time             {shares}",
    ]
    if report.peak_memory_bytes:
        lines.append(f"  peak memory      {report.peak_memory_bytes / 2**30:.2f} GiB")
    if work.groups_dropped:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in work.groups_dropped.items())
        lines.append(f"  dropped groups   {reasons}")
    return lines


def duration(seconds: float) -> str:
    """'3 min 12 s'."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"
