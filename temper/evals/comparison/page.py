"""A comparison as one HTML file and as a picture.

Owns: words, numbers and order of the page. Refuses: scripts and anything from a network. Whatever a model or a data set
wrote is escaped: a completion that holds HTML is shown as text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from importlib import import_module, resources
from pathlib import Path
from string import Template
from typing import Any

from temper.errors import UserError, install_line
from temper.evals.comparison.compare import Comparison, PromptChange
from temper.evals.comparison.verdict import Difference, Kind
from temper.runs.report.plot import COLORS, Line, Panel, chart
from temper.runs.results import SampleResult, SuiteResult

TONES = {
    Kind.SHARPENING: "good",
    Kind.EXPANSION: "good",
    Kind.NO_CHANGE: "still",
    Kind.REGRESSION: "bad",
    Kind.UNKNOWN: "unsure",
}
MOST_TEXT = 4000
"""Characters of one text on the page."""
MOST_PROMPTS = 200
"""Prompts shown with their texts, of those that got worse and of those that got better."""
CHART_WIDTH, BASE_COLOR, TRAINED_COLOR = 420, COLORS[7], COLORS[0]


def render_page(comparison: Comparison) -> str:
    """The page. Every piece that is put into the template is escaped text or markup made here."""
    base, trained, verdict = comparison.base, comparison.trained, comparison.verdict
    page = Template(resources.files("temper.evals").joinpath("compare.html").read_text(encoding="utf-8"))
    return page.substitute(
        title=escape(f"{base.suite}: {' → '.join(_names(base, trained))}"),
        subtitle=escape(
            f"{len(base.prompts)} prompts, {comparison.num_samples} samples each. "
            f"Base {base.checkpoint}, weights {base.weights_sha256[:12]}; "
            f"trained {trained.checkpoint}, weights {trained.weights_sha256[:12]}."
        ),
        tone=TONES[verdict.kind],
        verdict=escape(verdict.kind),
        evidence=escape(verdict.evidence),
        numbers=_numbers(comparison),
        charts="".join(
            f'<figure class="card">{chart([panel], width=CHART_WIDTH)}</figure>' for panel in panels(comparison)
        ),
        differences=_difference_table(comparison.differences),
        drift=_difference_table(comparison.drift),
        note=escape(chance_note(comparison)),
        num_worse=len(comparison.regressions),
        worse=_prompt_list(comparison.regressions),
        num_better=len(comparison.improvements),
        better=_prompt_list(comparison.improvements),
        num_prompts=len(comparison.prompts),
        prompts=_prompt_table(comparison.prompts),
        budget=_table(("", ""), ((name, str(value)) for name, value in comparison.budget.items())),
    )


def panels(comparison: Comparison) -> tuple[Panel, Panel]:
    """pass@k of both models, and the difference between them, over the logarithm of k."""
    rows = [row for row in comparison.differences if row.name.startswith("pass@")]
    counts = [int(row.name.removeprefix("pass@")) for row in rows]
    xs = [math.log2(count) for count in counts]
    both = (
        _curve("base", comparison.base, rows, xs, [row.base for row in rows], BASE_COLOR),
        _curve("trained", comparison.trained, rows, xs, [row.trained for row in rows], TRAINED_COLOR),
    )
    change = Line(
        label="trained - base",
        xs=xs,
        ys=[row.difference for row in rows],
        low=[row.low for row in rows],
        high=[row.high for row in rows],
        color=TRAINED_COLOR,
    )
    ends = (xs[0], xs[-1]) if len(xs) > 1 else (0.0, 1.0)
    zero = Line(label="no difference", xs=ends, ys=(0.0, 0.0), color=BASE_COLOR, is_dashed=True)
    axis: dict[str, Any] = {"x_label": "k", "x_names": {x: str(count) for x, count in zip(xs, counts, strict=True)}}
    return (
        Panel(title="pass@k", lines=both, y_label="share of prompts", y_range=(0.0, 1.0), **axis),
        Panel(title="difference of pass@k", lines=(change, zero), y_label="trained - base", **axis),
    )


def _curve(
    label: str, result: SuiteResult, rows: Sequence[Difference], xs: Sequence[float], ys: Sequence[float], color: str
) -> Line:
    line = Line(label=label, xs=xs, ys=ys, color=color)
    known = [result.metrics.get(row.name) for row in rows]
    if any(metric is None for metric in known):
        return line
    found = [metric for metric in known if metric is not None]
    return replace(line, low=[metric["low"] for metric in found], high=[metric["high"] for metric in found])


def write_png(panels: Sequence[Panel], path: Path) -> None:
    """The panels side by side, by matplotlib. Raises UserError with the line that installs it."""
    try:
        figure: Any = import_module("matplotlib.figure").Figure(figsize=(6 * len(panels), 4.2), dpi=150)
    except ImportError as error:
        raise UserError(f"a PNG needs matplotlib. Run: {install_line('plots')}") from error
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), place + 1)
        for number, line in enumerate(panel.lines):
            color = line.color or COLORS[number % len(COLORS)]
            style = {"linestyle": "--"} if line.is_dashed else {"marker": "o", "markersize": 4}
            axes.plot(line.xs, line.ys, color=color, label=line.label, **style)
            if line.low:
                axes.fill_between(line.xs, line.low, line.high, color=color, alpha=0.12, linewidth=0)
        # Names come from users: a dollar sign is a dollar sign, not the start of a formula.
        axes.set_title(panel.title, parse_math=False)
        axes.set_xlabel(panel.x_label, parse_math=False)
        axes.set_ylabel(panel.y_label, parse_math=False)
        axes.set_ylim(panel.y_range)
        if panel.x_names:
            axes.set_xticks(list(panel.x_names), labels=list(panel.x_names.values()))
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, format="png", metadata={"Software": None})


def chance_note(comparison: Comparison) -> str:
    """What many tests at once mean, with the numbers of this comparison."""
    tested = len(comparison.prompts)
    small = sum(change.p_value <= 0.05 for change in comparison.prompts)
    sure = sum(change.adjusted <= 0.05 for change in comparison.prompts)
    return (
        f"Each prompt is tested by itself. Of {tested} prompts {small} have p ≤ 0.05; with two equal models up to "
        f"{0.05 * tested:.0f} would. After the correction for that (Benjamini and Hochberg, q ≤ 0.05) {sure} remain."
    )


def say(value: float, unit: str) -> str:
    """A level: 61.2%, 123 tokens, 0.512."""
    if not math.isfinite(value):
        return "unknown"
    if unit == "%":
        return f"{value:.1%}"
    return f"{value:,.1f}" if unit else f"{value:.3f}"


def say_change(value: float, unit: str) -> str:
    if not math.isfinite(value):
        return "unknown"
    return f"{100 * value:+.1f}" if unit == "%" else f"{value:+,.1f}" if unit else f"{value:+.3f}"


def _numbers(comparison: Comparison) -> str:
    rows = {row.name: row for row in (*comparison.differences, *comparison.drift)}
    wanted = dict.fromkeys(
        ("pass@1", f"pass@{comparison.large_k}", f"maj@{comparison.large_k}", "length", "unscorable")
    )
    return "".join(
        f'<div class="card number"><span class="soft">{escape(row.name)}</span>'
        f"<b>{say(row.base, row.unit).removesuffix('%')} → {say(row.trained, row.unit)}</b>"
        f'<span class="soft">{_interval(row)}</span></div>'
        for name in wanted
        if (row := rows.get(name)) is not None
    )


def _interval(row: Difference) -> str:
    unit = {"%": " points", "": ""}.get(row.unit, f" {row.unit}")
    change, low, high = (say_change(value, row.unit) for value in (row.difference, row.low, row.high))
    return f"{change}{unit} ({low} to {high})"


def _difference_table(rows: Sequence[Difference]) -> str:
    head = ("", "base", "trained", "difference", "95% interval", "p", "prompts")
    return _table(
        head,
        (
            (
                row.name if row.unit in ("%", "") else f"{row.name} ({row.unit})",
                say(row.base, row.unit),
                say(row.trained, row.unit),
                say_change(row.difference, row.unit),
                f"{say_change(row.low, row.unit)} to {say_change(row.high, row.unit)}",
                f"{row.p_value:.2g}",
                str(row.num_prompts),
            )
            for row in rows
        ),
    )


def _prompt_table(changes: Sequence[PromptChange]) -> str:
    head = ("task", "base", "trained", "samples", "p", "q")
    return _table(
        head,
        (
            (
                change.task_id,
                f"{change.base:.1%}",
                f"{change.trained:.1%}",
                f"{change.num_base} / {change.num_trained}",
                f"{change.p_value:.2g}",
                f"{change.adjusted:.2g}",
            )
            for change in changes
        ),
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """All cells are text."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _prompt_list(changes: Sequence[PromptChange]) -> str:
    if not changes:
        return '<p class="soft">None.</p>'
    rest = len(changes) - MOST_PROMPTS
    more = f'<p class="soft">{rest} more are in the table of all prompts.</p>' if rest > 0 else ""
    return "".join(map(_prompt, changes[:MOST_PROMPTS])) + more


def _prompt(change: PromptChange) -> str:
    tone = "bad" if change.difference < 0 else "good"
    sure = "" if change.adjusted <= 0.05 else ", may be chance"
    return (
        f'<details class="{tone}"><summary><span class="name">{escape(_line(change.prompt))}</span>'
        f'<b class="toned">{change.base:.0%} → {change.trained:.0%}</b>'
        f'<span class="soft">p {change.p_value:.2g}{sure}</span></summary><div class="inside">'
        f'<div class="full"><h3>{escape(change.task_id)}</h3><pre>{_text(change.prompt)}</pre></div>'
        + ("" if change.gold is None else f'<div class="full"><h3>gold</h3><pre>{_text(change.gold)}</pre></div>')
        + _sample("base", change.base_sample)
        + _sample("trained", change.trained_sample)
        + "</div></details>"
    )


def _sample(who: str, sample: SampleResult) -> str:
    score = f"score {sample.score:g}" if sample.score is not None else f"no score: {sample.reason}"
    head = f"{who}: {score}, {sample.num_tokens} tokens, {sample.status}"
    return f"<div><h3>{escape(head)}</h3><pre>{_text(sample.text)}</pre></div>"


def _text(text: str) -> str:
    cut = f"\n… {len(text) - MOST_TEXT:,} more characters" if len(text) > MOST_TEXT else ""
    return escape(text[:MOST_TEXT] + cut)


def _line(text: str) -> str:
    """A prompt in one line."""
    line = " ".join(text.split())
    return line if len(line) <= 110 else line[:109] + "…"


def _names(base: SuiteResult, trained: SuiteResult) -> tuple[str, str]:
    """What the two checkpoints are called: the ends of their paths, unless these are the same."""
    paths = Path(base.checkpoint), Path(trained.checkpoint)
    short = [path.parts[-1] if path.parts else "" for path in paths]
    return (short[0], short[1]) if short[0] != short[1] else (base.checkpoint, trained.checkpoint)
