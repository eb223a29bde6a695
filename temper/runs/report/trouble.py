"""What went wrong in a run that did not end it: alarms, and stages in which nothing could be learned.

Owns: their lines in the report. Refuses: reading the run (report.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from temper.runs.records import AlarmRecord
from temper.runs.report.summary import StageSummary

LEVELS = ("stop", "pause", "warn", "note")


def alarm_lines(alarms: Sequence[AlarmRecord], stages: Mapping[int, str]) -> list[str]:
    """One line per rule and one with its advice, the gravest first: how often it rang, and what it saw last."""
    by_rule: dict[str, list[AlarmRecord]] = {}
    for alarm in alarms:
        by_rule.setdefault(alarm.rule, []).append(alarm)
    ordered = sorted(by_rule.values(), key=lambda rung: (LEVELS.index(rung[-1].level), -len(rung)))
    lines = []
    for rung in ordered:
        last = rung[-1]
        times = "once" if len(rung) == 1 else f"{len(rung)} times"
        where = f"{stages.get(last.stage, f'stage {last.stage}')} step {last.step}"
        lines.append(f"  {last.level:<17}{last.rule}, {times}, last at {where}: {last.text}")
        lines.append(f"  {'':<17}Try: {last.advice}")
    return lines


def signal_lines(stages: Sequence[StageSummary]) -> list[str]:
    """A line for each stage in which no group of any step had two different rewards."""
    return [
        f"  no signal        {stage.name}: in none of {len(stage.degenerate)} steps had a group two different rewards, "
        "so there was nothing to learn from. Tasks too hard or too easy, or a reward that cannot tell answers apart"
        for stage in stages
        if is_without_signal(stage)
    ]


def is_without_signal(stage: StageSummary) -> bool:
    """Whether every step that drew groups drew only such with equal rewards."""
    return bool(stage.degenerate) and all(share == 1 for share in stage.degenerate)
