"""What a run achieved, from its directory alone: `temper report`.

Owns: the summary and how it reads as text and as JSON. A gain is shown only between scores taken under equal budgets.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from temper.errors import UserError
from temper.folders.integrity import sha256_of, verify
from temper.runs.reader import LedgerEntry, Point, RunReader, StepRecord
from temper.runs.records import AlarmRecord
from temper.runs.report.idle import describe_idle, idle_by_stage
from temper.runs.report.phases import Phase, phase_lines, phases_of
from temper.runs.report.sparkline import sparkline
from temper.runs.report.stage_table import stage_lines
from temper.runs.report.summary import Kept, ScoreChange, StageSummary, Work
from temper.runs.report.trouble import alarm_lines, signal_lines
from temper.runs.state import RunState
from temper.runs.store.encode import TRAINED
from temper.runs.store.nulls import finite
from temper.types import EvaluationResult

WEIGHTS = ("model.safetensors", "adapter_model.safetensors")
"""Files of weights in a checkpoint: all weights, or an adapter alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    folder: str
    is_finished: bool
    state: RunState
    scores: tuple[ScoreChange, ...]
    """First and last of the whole run, up to the first stage that starts elsewhere than where the last one ended."""
    work: Work
    stages: tuple[StageSummary, ...]
    heldout: Mapping[str, tuple[float, ...]]
    """Every held-out score in order, by name."""
    phases: tuple[Phase, ...]
    """How often held-out answers look back, before training and after each stage."""
    failures: Mapping[str, int]
    """Rollouts that broke or could not be scored, by reason."""
    failing_tasks: Mapping[str, tuple[str, ...]]
    """Whose they were, by the same reasons."""
    alarms: tuple[AlarmRecord, ...]
    """In the order in which they rang."""
    checkpoint: str | None
    """The newest checkpoint; None when there is none yet."""
    weights: str | None
    """The file of weights in that checkpoint."""
    weights_sha256: str | None
    damage: str | None
    """What is wrong with that checkpoint; None: it is what was written."""
    peak_memory_bytes: float | None
    """Most that was held at once, of the device or of the process; None before the first step."""


def make_report(folder: Path) -> Report:
    """Summarises a run, live or finished."""
    with RunReader(folder) as reader:
        steps, ledger, evaluations = reader.steps(), reader.ledger(), reader.evaluations()
        seconds, rewards = reader.seconds(), reader.metric("reward/mean")
        degenerate, alarms = reader.metric("data/degenerate"), reader.alarms()
        names = {record.stage: record.name for record in reader.stages()}
        numbers = sorted({record.stage for record in steps} | {result.stage for result in evaluations} | names.keys())
        failures, failing_tasks, state = reader.failures(), reader.failing_tasks(), reader.state
        memory = _largest(reader.metric("sys/peak_memory_bytes"))
        since_start = _largest(reader.metric("sys/peak_memory_since_start"))
        kept, idle = _kept(reader), idle_by_stage(reader)
    origins = _origins(folder)
    stages = tuple(
        StageSummary(
            stage=number,
            name=names.get(number, f"stage {number}"),
            scores=_changes(result for result in evaluations if result.stage == number),
            work=_work([s for s in steps if s.stage == number], [e for e in ledger if e.stage == number], seconds),
            reward=tuple(point.value for point in rewards if point.stage == number),
            degenerate=tuple(point.value for point in degenerate if point.stage == number),
            peak_memory_bytes=memory.get(number),
            peak_is_since_start=bool(since_start.get(number)),
            starts_from=origins.get(number, ""),
            kept=kept.get(number),
            idle=idle.get(number, {}),
        )
        for number in numbers
    )
    checkpoint, damage = _verified_checkpoint(folder)
    weights = None if checkpoint is None or damage else weights_of(checkpoint)
    line = min((number for number in numbers if origins.get(number)), default=math.inf)
    return Report(
        folder=str(folder),
        is_finished=state.is_finished,
        state=state,
        scores=_changes(result for result in evaluations if result.stage < line),
        work=_work(steps, ledger, seconds),
        stages=stages,
        heldout={name: tuple(r.score for r in evaluations if r.name == name) for name in _names(evaluations)},
        phases=phases_of(evaluations, names),
        failures=failures,
        failing_tasks=failing_tasks,
        alarms=tuple(alarms),
        checkpoint=None if checkpoint is None else str(checkpoint.relative_to(folder)),
        weights=None if weights is None else weights.name,
        weights_sha256=None if weights is None else sha256_of(weights),
        damage=damage,
        peak_memory_bytes=max(memory.values(), default=None),
    )


def newest_checkpoint(folder: Path) -> Path | None:
    """checkpoints/<stage>-<kind>/step-<n> of the last stage and step; unfinished ones bear other names."""
    found = (folder / "checkpoints").glob("*-*/step-*")
    numbered = [(path.parent.name.partition("-")[0], path.name.removeprefix("step-"), path) for path in found]
    ordered = [(int(stage), int(step), path) for stage, step, path in numbered if (stage + step).isdecimal()]
    return max(ordered)[2] if ordered else None


def weights_of(checkpoint: Path) -> Path | None:
    """The file of weights in a checkpoint; None when there are several, or none."""
    return next((path for name in WEIGHTS if (path := checkpoint / name).is_file()), None)


def _verified_checkpoint(folder: Path) -> tuple[Path | None, str | None]:
    """The newest checkpoint and what is wrong with it. A live run may remove one that is being read: then the next."""
    for _ in range(3):
        newest = newest_checkpoint(folder)
        if newest is None:
            return None, None
        try:
            verify(newest)
            return newest, None
        except (UserError, OSError) as error:
            if newest.is_dir():
                return newest, str(error)
    return None, None


def _largest(points: Iterable[Point]) -> dict[int, float]:
    """The largest value by stage."""
    largest: dict[int, float] = {}
    for point in points:
        if point.value is not None:
            largest[point.stage] = max(point.value, largest.get(point.stage, point.value))
    return largest


def _kept(reader: RunReader) -> dict[int, Kept]:
    """What rejection sampling made, by stage."""
    found: dict[str, dict[int, list[float]]] = {}
    for name in ("keep/rows", "keep/prompts", "keep/share", "keep/best_of_n", "reward/mean"):
        found[name] = {}
        for point in reader.metric(name):
            if point.value is not None:
                found[name].setdefault(point.stage, []).append(point.value)
    return {
        stage: Kept(
            rows=int(rows[-1]),
            prompts=int(found["keep/prompts"][stage][-1]),
            share=fmean(found["keep/share"][stage]),
            mean_reward=fmean(found["reward/mean"].get(stage, [math.nan])),
            best_reward=fmean(found["keep/best_of_n"].get(stage, [math.nan])),
        )
        for stage, rows in found["keep/rows"].items()
    }


def _origins(folder: Path) -> dict[int, str]:
    """Stages that start elsewhere than where the one before ended, by the recipe that the run keeps."""
    path = folder / "config.toml"
    table = tomllib.loads(path.read_text()) if path.is_file() else {}
    stages = table.get("stage", ())
    paths = {number: str(stage.get("model", {}).get("path", "")) for number, stage in enumerate(stages) if number}
    return {number: path.removeprefix("stage:") for number, path in paths.items() if path.startswith("stage:")}


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
        made["gain"], made["gain_interval"] = change.gain, change.gain_interval
    return json.dumps(finite(value), indent=2, ensure_ascii=False)


def _pairs(report: Report, value: dict[str, Any]) -> Iterable[tuple[ScoreChange, dict[str, Any]]]:
    yield from zip(report.scores, value["scores"], strict=True)
    for stage, made in zip(report.stages, value["stages"], strict=True):
        yield from zip(stage.scores, made["scores"], strict=True)


def render(report: Report) -> str:
    """The report as text for a terminal."""
    total = sum(report.work.seconds.values())
    lines = [f"{report.folder}: {report.state.name}, {report.work.num_steps} steps, {duration(total)}", ""]
    if report.state.text:
        lines += [f"  {report.state.name:<17}{report.state.text}", ""]
    lines += [*_score_lines(report), *phase_lines(report.phases)]
    lines += _curve_lines(report)
    trouble = signal_lines(report.stages)
    trouble += alarm_lines(report.alarms, {stage.stage: stage.name for stage in report.stages})
    lines += [*trouble, ""] if trouble else []
    lines += _work_lines(report)
    for reason, times in list(report.failures.items())[:5]:
        lines.append(f"  failed rollouts  {times:,} x {reason} ({_few(report.failing_tasks.get(reason, ()))})")
    if report.damage:
        lines += ["", f"  damaged          {report.damage}"]
    elif report.weights:
        lines += [
            "",
            f"  final weights    {report.checkpoint}/{report.weights}",
            f"  sha256           {report.weights_sha256}",
        ]
    return "\n".join(lines)


def _few(tasks: Sequence[str]) -> str:
    """Where to look: a fault that shows in the reward is often one row's."""
    more = f" and {len(tasks) - 3} more" if len(tasks) > 3 else ""
    return f"{'task' if len(tasks) == 1 else 'tasks'} {', '.join(tasks[:3])}{more}"


def _score_lines(report: Report) -> list[str]:
    every = [change for stage in report.stages for change in stage.scores]
    if not every:
        return ["  no held-out scores yet"]
    lines = [*stage_lines(report.stages), ""] if _has_table(report) else []
    shown = [change for change in report.scores if not _is_of_one_stage(report, change)]
    if shown:
        lines.append(f"  {_whole(report):<32}{'before':<26}{'after':<26}gain")
    for change in shown:
        gain = _gain(change)
        after = score(change.last)
        if (change.first.stage, change.first.step) == (change.last.stage, change.last.step):
            after, gain = "not measured yet", ""
        lines.append(f"  {change.name:<32}{score(change.first):<26}{after:<26}{gain}".rstrip())
    last = every[0].last
    samples = {change.name: f"{change.name} {change.last.samples_per_prompt} per prompt" for change in every}
    lines.append(f"  {last.num_prompts} held-out prompts; {', '.join(samples.values())}")
    lines.append(f"  always giving the commonest answer scores {100 * last.constant_score:.1f}%")
    return lines


def _has_table(report: Report) -> bool:
    return len(report.stages) > 1 and any(stage.scores for stage in report.stages)


def _is_of_one_stage(report: Report, change: ScoreChange) -> bool:
    """Whether the table by stage has said it all."""
    return _has_table(report) and change.first.stage == change.last.stage


def _gain(change: ScoreChange) -> str:
    """'+18.2 points [11.9, 24.4]', or why there is none."""
    if change.gain is None:
        return f"not comparable: {', '.join(change.differs)}"
    interval = change.gain_interval
    inside = "" if interval is None else f" [{100 * interval[0]:+.1f}, {100 * interval[1]:+.1f}]"
    return f"{100 * change.gain:+.1f} points{inside}"


def _whole(report: Report) -> str:
    """'stages 1 to 6, 95% interval': a stage that starts elsewhere is not part of what the others made."""
    number = next((stage.stage for stage in report.stages if stage.starts_from), None)
    return "held-out score, 95% interval" if number is None else f"stages 1 to {number}, 95% interval"


def score(result: EvaluationResult) -> str:
    """'56.2% [51.8, 60.5]'."""
    return f"{100 * result.score:.1f}% [{100 * result.low:.1f}, {100 * result.high:.1f}]"


def _curve_lines(report: Report) -> list[str]:
    lines = [""]
    for stage in report.stages:
        known = [value for value in stage.reward if value is not None]
        if known:
            lines.append(f"  reward, {stage.name:<12}{known[0]:.3f} {sparkline(stage.reward)} {known[-1]:.3f}")
    for name, values in report.heldout.items():
        if len(values) > 1 and not any(stage.starts_from for stage in report.stages):
            lines.append(f"  {name:<20}{values[0]:.3f} {sparkline(values)} {values[-1]:.3f}")
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
    if idle := "; ".join(describe_idle(stage) for stage in report.stages if stage.idle):
        lines.append(f"  idle             {idle}")
    if report.peak_memory_bytes:
        lines.append(f"  peak memory      {report.peak_memory_bytes / 2**30:.2f} GiB{_memory_by_stage(report)}")
    if work.groups_dropped:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in work.groups_dropped.items())
        lines.append(f"  dropped groups   {reasons}")
    return lines


def _memory_by_stage(report: Report) -> str:
    """': sft 1.20, rl 2.31 (since the start)'; empty when the table has it, or there is a single stage, and all were
    counted from their beginning."""
    measured = [stage for stage in report.stages if stage.peak_memory_bytes is not None]
    is_known = len(measured) == 1 or _has_table(report)
    if is_known and not any(stage.peak_is_since_start for stage in measured):
        return ""
    parts = [
        f"{stage.name} {(stage.peak_memory_bytes or 0) / 2**30:.2f}"
        f"{' (since the start)' if stage.peak_is_since_start else ''}"
        for stage in measured
    ]
    return f": {', '.join(parts)}"


def duration(seconds: float) -> str:
    """'3 min 12 s'."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"
