"""Simulated runs as a table, a picture and JSON.

Owns: words, columns, panels. Refuses: numbers that are not in the runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields

from rich.table import Column, Table

from temper.runs.report.plot import Line, Panel, chart
from temper.simulate.outcome import SimulatedRun
from temper.simulate.speeds import Speeds


def render_runs(runs: Sequence[SimulatedRun], title: str) -> Table:
    idle = ("draw\nidle", "train\nidle")
    names = ("GPUs", "draw+train", "s/step", "tokens/s", *idle, "stale", "max", "drawn", "length", "gain")
    right = (Column(name, justify="right", no_wrap=True) for name in names)
    table = Table(Column("S", no_wrap=True), *right, title=title, title_justify="left", padding=(0, 0))
    for run in runs:
        sync = next((other for other in runs if other.gpus == run.gpus and other.max_staleness == 0), None)
        table.add_row(
            str(run.max_staleness) if run.max_staleness else "sync",
            str(run.gpus),
            ("in turn" if run.is_shared else f"{run.samplers}+{run.trainers}") + (" p" if run.parts else ""),
            f"{run.seconds_per_step:.3g}",
            f"{run.tokens_per_second:,.0f}",
            f"{run.sampler_idle:.0%}",
            f"{run.trainer_idle:.0%}",
            f"{run.stale_mean:.2f}",
            str(run.stale_max),
            f"{run.drawn_per_trained:.2f}",
            f"{run.length_ratio:.2f}",
            f"{sync.seconds_per_step / run.seconds_per_step:.2f}x" if sync is not None else "",
        )
    return table


def describe_speeds(speeds: Speeds) -> str:
    """The numbers that are not 0, in a unit that reads well."""
    named = {field.name: getattr(speeds, field.name) for field in fields(speeds)}
    return ", ".join(f"{name} {_seconds(value)}" for name, value in named.items() if value)


def _seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def draw_runs(runs: Sequence[SimulatedRun]) -> str:
    """An SVG: by GPUs where there are several numbers of them, a line for each S; otherwise by S."""
    counts = sorted({run.gpus for run in runs})
    panels: list[tuple[str, Callable[[SimulatedRun], float], tuple[float, float] | None]] = [
        ("seconds a step", lambda run: run.seconds_per_step, None),
        ("sampler idle, share", lambda run: run.sampler_idle, (0.0, 1.0)),
        ("trainer idle, share", lambda run: run.trainer_idle, (0.0, 1.0)),
        ("staleness, versions", lambda run: run.stale_mean, None),
    ]
    if len(counts) > 1:
        names = {math.log2(count): str(count) for count in counts}
        lines = {mode: [run for run in runs if run.mode == mode] for mode in dict.fromkeys(run.mode for run in runs)}
        return chart(
            [
                Panel(title=title, lines=[_line(mode, own, _log_gpus, value) for mode, own in lines.items()],
                      x_label="GPUs", x_names=names, y_range=_from_zero(runs, value, limits))
                for title, value, limits in panels
            ],
            width=300,
        )  # fmt: skip
    label = f"{counts[0]} GPU{'s' if counts[0] > 1 else ''}"
    names = {float(run.max_staleness): str(run.max_staleness) for run in runs}
    return chart(
        [
            Panel(title=title, lines=[_line(label, runs, lambda run: float(run.max_staleness), value)],
                  x_label="S", x_names=names, y_range=_from_zero(runs, value, limits))
            for title, value, limits in panels
        ],
        width=300,
    )  # fmt: skip


def _log_gpus(run: SimulatedRun) -> float:
    return math.log2(run.gpus)


def _line(
    label: str, runs: Sequence[SimulatedRun], x: Callable[[SimulatedRun], float], y: Callable[[SimulatedRun], float]
) -> Line:
    return Line(label=label, xs=[x(run) for run in runs], ys=[y(run) for run in runs])


def _from_zero(
    runs: Sequence[SimulatedRun], value: Callable[[SimulatedRun], float], limits: tuple[float, float] | None
) -> tuple[float, float]:
    return limits or (0.0, 1.05 * max(1e-9, *(value(run) for run in runs)))


def as_json(runs: Sequence[SimulatedRun], speeds: Sequence[Speeds]) -> str:
    """`speeds`: of each run."""
    rows = [{**asdict(run), "speeds": asdict(own)} for run, own in zip(runs, speeds, strict=True)]
    return json.dumps(rows, indent=1)
