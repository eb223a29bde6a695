"""Draws what a run achieved: reward, held-out score with its interval, and how its tools were used.

python benchmarks/curve.py runs/agent_calculator docs/agent.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

from temper.runs.reader import RunReader
from temper.runs.report.plot import Line, Panel, chart


def main(run: Path, target: Path) -> None:
    with RunReader(run) as reader:
        stage = reader.stages()[-1].stage
        panels = [rewards(reader, stage), heldout(reader, stage)]
        panels += [tools(reader, stage)] if reader.metric("gen/tool_calls_mean") else []
    target.write_text(chart(panels, width=340, legend="each"))


def rewards(reader: RunReader, stage: int) -> Panel:
    return Panel(title="training reward", lines=[metric(reader, stage, "reward/mean", "reward")], x_label="step")


def heldout(reader: RunReader, stage: int) -> Panel:
    found = [score for score in reader.evaluations() if score.stage == stage]
    lines = []
    for name in dict.fromkeys(score.name for score in found):
        own = [score for score in found if score.name == name]
        lines.append(
            Line(
                label=name,
                xs=[score.step for score in own],
                ys=[score.score for score in own],
                low=[score.low for score in own],
                high=[score.high for score in own],
            )
        )
    return Panel(title="held-out success, 95% interval", lines=lines, x_label="step", y_range=(0.0, 1.0))


def tools(reader: RunReader, stage: int) -> Panel:
    names = {"gen/tool_calls_mean": "calls", "gen/tool_error_rate": "failed calls", "gen/bad_call_rate": "bad calls"}
    lines = [metric(reader, stage, name, label) for name, label in names.items()]
    return Panel(title="tool use per episode", lines=lines, x_label="step")


def metric(reader: RunReader, stage: int, name: str, label: str) -> Line:
    points = [point for point in reader.metric(name) if point.stage == stage and point.value is not None]
    return Line(label=label, xs=[point.step for point in points], ys=[point.value or 0.0 for point in points])


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
