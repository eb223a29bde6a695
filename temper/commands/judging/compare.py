"""`temper compare BASE TRAINED`: what training did, as a page, a picture and numbers.

Owns: finding or making the two results, where the files go, what is printed. Refuses: unlike budgets, before anything
is drawn.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from temper.commands.judging.evaluate import SuiteRequest, budget_of, evaluate_suite, with_decoding
from temper.errors import UserError
from temper.evals.comparison.compare import Comparison, PromptChange, compare
from temper.evals.comparison.page import chance_note, panels, render_page, say, say_change, write_png
from temper.evals.comparison.verdict import LARGE_K, Difference
from temper.evals.suites import load_suite, read_tasks
from temper.runs.results import SuiteResult, differing_budget, load
from temper.terminal import print_line

SHOWN = 5
"""Prompts that got worse, in the terminal; the page has all."""
Note = Callable[[str], None]


def compare_models(base: Path, trained: Path, asked: SuiteRequest, *, out: Path, note: Note = print_line) -> Comparison:
    """Compares two results of `temper eval --suite`, or two checkpoints, or one of each; writes into `out`.

    Checkpoints are asked as the other's result was, or both as `asked` says, with 64 samples unless it says otherwise.
    """
    results = [load(path) if path.is_file() else None for path in (base, trained)]
    known = next((result for result in results if result is not None), None)
    asked = _like(known, asked) if known is not None else _with_samples(asked)
    found = [
        result or _evaluate(path, dataclasses.replace(asked, out=out / f"{name}.json"), known, note)
        for name, path, result in zip(("base", "trained"), (base, trained), results, strict=True)
    ]
    comparison = compare(found[0], found[1], seed=asked.seed)
    write_comparison(comparison, out, note)
    return comparison


def write_comparison(comparison: Comparison, out: Path, note: Note = print_line) -> None:
    """compare.html, compare.json and, where matplotlib is installed, compare.png."""
    out.mkdir(parents=True, exist_ok=True)
    # A model may have drawn half a character.
    (out / "compare.html").write_text(render_page(comparison), encoding="utf-8", errors="replace")
    (out / "compare.json").write_text(as_json(comparison), encoding="utf-8", errors="replace")
    note(f"saved: {out / 'compare.html'}, compare.json")
    try:
        write_png(panels(comparison), out / "compare.png")
    except UserError as error:
        note(f"no compare.png: {error}")


def as_json(comparison: Comparison) -> str:
    """All numbers, without the texts; null where a bound is not finite."""
    return json.dumps(
        {
            "suite": comparison.base.suite,
            "base": _who(comparison.base),
            "trained": _who(comparison.trained),
            "budget": dict(comparison.budget),
            "num_samples": comparison.num_samples,
            "verdict": dataclasses.asdict(comparison.verdict),
            "differences": [_difference(row) for row in comparison.differences],
            "drift": [_difference(row) for row in comparison.drift],
            "prompts": [_prompt(change) for change in comparison.prompts],
        },
        indent=1,
        allow_nan=False,
    )


def render(comparison: Comparison) -> RenderableType:
    """What the terminal shows: the verdict first."""
    table = Table("", "base", "trained", "difference", "95% interval", "p", title=comparison.base.suite)
    for row in (*comparison.differences, *comparison.drift):
        unit = {"%": " points", "": ""}.get(row.unit, f" {row.unit}")
        interval = f"{say_change(row.low, row.unit)} to {say_change(row.high, row.unit)}"
        levels = (say(row.base, row.unit), say(row.trained, row.unit))
        table.add_row(row.name, *levels, say_change(row.difference, row.unit) + unit, interval, f"{row.p_value:.2g}")
    verdict = comparison.verdict
    worse, better = comparison.regressions, comparison.improvements
    lines = [f"{len(worse)} prompts got worse, {len(better)} better. {chance_note(comparison)}"]
    lines += [
        f"  {change.task_id}: {change.base:.0%} to {change.trained:.0%}, p = {change.p_value:.2g}"
        for change in worse[:SHOWN]
    ]
    return Group(Text(f"{verdict.kind}: {verdict.evidence}", style="bold"), table, Text("\n".join(lines)))


def _with_samples(asked: SuiteRequest) -> SuiteRequest:
    """As many samples as a verdict about large k needs, unless the user said how many."""
    return asked if asked.samples is not None else dataclasses.replace(asked, samples=LARGE_K)


def _like(result: SuiteResult, asked: SuiteRequest) -> SuiteRequest:
    """The settings of a result, for the checkpoint it is compared with."""
    budget: dict[str, Any] = dict(result.budget)
    names = ("samples", "temperature", "top_p", "max_new_tokens", "thinking_budget")
    given = {name: budget[name] for name in names if name in budget and getattr(asked, name) is None}
    return dataclasses.replace(
        asked,
        suite=asked.suite or result.suite,
        seed=int(budget.get("seed", asked.seed)),
        limit=asked.limit or len(result.prompts),
        **given,
    )


def _evaluate(checkpoint: Path, asked: SuiteRequest, known: SuiteResult | None, note: Note) -> SuiteResult:
    if not asked.suite:
        raise UserError(f"{checkpoint} is no result file, so a suite must be asked. Say which: --suite gsm8k")
    if known is not None:
        suite = with_decoding(load_suite(asked.suite, data=asked.data, overrides=asked.overrides), asked)
        tasks = read_tasks(suite, limit=asked.limit)
        planned = dataclasses.replace(known, budget=budget_of(suite, tasks, asked.seed))
        if differing := differing_budget(known, planned):
            raise UserError(
                f"{checkpoint} would not be asked as {known.checkpoint} was: {'; '.join(differing)}. "
                f"Ask as then (--data, --set), or give both checkpoints"
            )
    return evaluate_suite(checkpoint, dataclasses.replace(asked, force=True), note=note)


def _who(result: SuiteResult) -> dict[str, str]:
    return {"checkpoint": result.checkpoint, "weights_sha256": result.weights_sha256}


def _difference(row: Difference) -> dict[str, Any]:
    table = {**dataclasses.asdict(row), "difference": row.difference}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in table.items()
    }


def _prompt(change: PromptChange) -> dict[str, Any]:
    names = ("task_id", "base", "trained", "num_base", "num_trained", "p_value", "adjusted")
    return {name: getattr(change, name) for name in names}
