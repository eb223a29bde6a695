"""How long trainer and sampler had nothing to do.

Owns: shares of a stage from those of its steps. Refuses: measuring them (time_split.py).
"""

from __future__ import annotations

from collections import defaultdict

from temper.runs.reader import RunReader
from temper.runs.report.summary import StageSummary

SIDES = {"trainer": "sys/trainer_idle", "sampler": "sys/sampler_idle"}


def idle_by_stage(reader: RunReader) -> dict[int, dict[str, float]]:
    """Shares of the wall time of stages in which somebody waits for rollouts, by stage and side."""
    walls = {(point.stage, point.step): point.value or 0.0 for point in reader.metric("sys/step_time")}
    drawing = {stage for (stage, phase) in reader.seconds() if phase == "rollout"}
    found: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for side, name in SIDES.items():
        idle, total = defaultdict[int, float](float), defaultdict[int, float](float)
        for point in reader.metric(name):
            wall = walls.get((point.stage, point.step), 0.0)
            idle[point.stage] += wall * (point.value or 0.0)
            total[point.stage] += wall
        for stage in drawing & {stage for stage, wall in total.items() if wall}:
            found[stage][side] = idle[stage] / total[stage]
    return dict(found)


def describe_idle(stage: StageSummary) -> str:
    """Such as: rl: trainer 61%, sampler 20%."""
    shares = ", ".join(f"{side} {share:.0%}" for side, share in stage.idle.items())
    return f"{stage.name}: {shares}"
