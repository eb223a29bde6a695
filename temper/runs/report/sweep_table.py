"""What the runs of a sweep achieved, side by side: a table, and a page that needs nothing else.

Owns: which score counts and how runs are ordered. Refuses: training them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from temper.runs.reader import DATABASE, RunReader
from temper.runs.report.plot import COLORS, Line, Panel, chart
from temper.runs.report.report import duration, score
from temper.types import EvaluationResult

STYLE = """body { margin: 0 auto; max-width: 1120px; padding: 24px 16px; font: 15px/1.5 system-ui, sans-serif; }
table { border-collapse: collapse; } th, td { padding: 4px 12px; border-bottom: 1px solid #d8dee4; text-align: left; }
td { font-variant-numeric: tabular-nums; } svg { max-width: 100%; height: auto; } tr.tied { background: #dafbe1; }"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One run of a sweep."""

    values: Mapping[str, str]
    """By key, what this run has and others have not."""
    folder: str
    state: str
    """Of the run directory: "finished", "failed", ...; "not started" without one."""
    why: str
    """Why it ended early; empty: it did not."""
    num_steps: int
    seconds: float
    evaluations: tuple[EvaluationResult, ...]
    """Of the score that counts: "greedy" where it was measured; empty: none was."""
    offsets: tuple[int, ...]
    """Steps of all stages before each stage."""

    @property
    def last(self) -> EvaluationResult | None:
        return self.evaluations[-1] if self.evaluations else None


def read_row(folder: Path, values: Mapping[str, str]) -> SweepRow:
    if not (folder / DATABASE).is_file():
        return SweepRow(
            values=values, folder=str(folder), state="not started", why="", num_steps=0, seconds=0.0, evaluations=(),
            offsets=(),
        )  # fmt: skip
    with RunReader(folder) as reader:
        results, stages = reader.evaluations(), reader.stages()
        name = "greedy" if any(result.name == "greedy" for result in results) else results[0].name if results else ""
        return SweepRow(
            values=values,
            folder=str(folder),
            state=reader.state.name,
            why=reader.state.text,
            num_steps=len(reader.steps()),
            seconds=sum(reader.seconds().values()),
            evaluations=tuple(result for result in results if result.name == name),
            offsets=tuple(sum(stage.steps for stage in stages[:place]) for place in range(len(stages))),
        )


def order_rows(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """The best score first; runs without one last."""
    return sorted(rows, key=lambda row: (row.last is None, -(row.last.score if row.last else 0.0)))


def tied_with_best(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """Runs whose interval overlaps that of the best: this sweep does not tell them apart. The best is one of them."""
    known = [(row, row.last) for row in order_rows(rows) if row.last is not None]
    return [row for row, last in known if last.high >= known[0][1].low]


def row_cells(row: SweepRow) -> list[str]:
    shown = score(row.last) if row.last else row.why[:60]
    return [*row.values.values(), shown, row.state, str(row.num_steps), duration(row.seconds)]


def header(rows: Sequence[SweepRow]) -> list[str]:
    name = next((row.last.name for row in rows if row.last), "score")
    keys = list(rows[0].values) if rows else []
    short = [key.rpartition(".")[2] for key in keys]
    return [*(short if len(set(short)) == len(keys) else keys), f"held out, {name}", "state", "steps", "time"]


def tie_line(rows: Sequence[SweepRow]) -> str:
    """What the intervals allow to be said, in one sentence."""
    tied, scored = tied_with_best(rows), [row for row in rows if row.last]
    if len(scored) < 2:
        return "Fewer than two runs have a held-out score: nothing can be compared."
    if len(tied) == 1:
        return f"The best run is better than the other {len(scored) - 1}: no interval reaches its own."
    return (
        f"{len(tied)} of {len(scored)} runs have intervals that overlap with that of the best: held-out tasks, or "
        "seeds (--set seed=1,2,3), are too few to tell them apart."
    )


def render_page(title: str, rows: Sequence[SweepRow]) -> str:
    """One HTML file without scripts; whatever a recipe wrote is escaped."""
    ordered, tied = order_rows(rows), tied_with_best(rows)
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header(ordered))
    body = "\n".join(
        f"<tr{' class=tied' if row in tied else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row_cells(row))
        + "</tr>"
        for row in ordered
    )
    lines = [_line(row) for row in ordered if len(row.evaluations) > 1][: len(COLORS)]
    panel = Panel(title="held-out score", lines=lines, x_label="step", y_label="score")
    picture = chart([panel], width=900, height=420) if lines else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>{STYLE}</style></head><body>
<h1>{escape(title)}</h1>
<p>{escape(tie_line(rows))} They are marked.</p>
<table><thead><tr>{head}</tr></thead><tbody>
{body}
</tbody></table>
{picture}
</body></html>
"""


def _line(row: SweepRow) -> Line:
    xs = [row.offsets[result.stage] + result.step for result in row.evaluations]
    return Line(
        label=", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in row.values.items()),
        xs=xs,
        ys=[result.score for result in row.evaluations],
    )
