"""`temper eval`: a checkpoint on a suite or on a recipe's held-out tasks.

Heavy imports happen inside the verb, so --help is instant.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from temper.cli.console import Overrides, app, importing, out, require_checkpoint
from temper.cli.judging.options import require_suite
from temper.errors import UserError
from temper.terminal import SafeConsole

IN_A_RECIPE = {
    "--samples": "evaluation.samples",
    "--temperature": "evaluation.temperature",
    "--top-p": "evaluation.top_p",
    "--max-new-tokens": "evaluation.max_new_tokens",
    "--limit": "heldout.size",
    "--fast": "engine.numerics",
}
"""Options of suites, and the keys that say the same of held-out tasks."""


@app.command("eval")
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint or run directory")],
    recipe: Annotated[Path | None, typer.Argument(help="Recipe with the held-out set; default: the run's own")] = None,
    suite: Annotated[str, typer.Option(help="gsm8k, math500, ... or your own .toml; default: the recipe")] = "",
    data: Annotated[Path | None, typer.Option(help="File with the suite's rows; default: a small sample")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Per prompt; default: as the suite says")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw among the tokens that hold this probability")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Of one turn")] = None,
    thinking_budget: Annotated[
        int | None, typer.Option(min=1, help="Tokens after which thinking is closed, as by rollout.thinking")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Only the first prompts; 0: all")] = 0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    target: Annotated[Path | None, typer.Option("--out", help="Result; default evaluations/...")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a result of another budget")] = False,
    fast: Annotated[bool, typer.Option("--fast", help="Last digits then depend on what is batched")] = False,
    set_: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable")] = False,
) -> None:
    """Score of a checkpoint with 95% intervals: on a suite, or on the held-out set of a recipe."""
    require_checkpoint(checkpoint)
    require_suite(suite, data, set_)
    if suite:
        with importing():
            from temper.commands.judging.evaluate import SuiteRequest, evaluate_suite, render

        asked = SuiteRequest(
            suite=suite, data=data, samples=samples, temperature=temperature, top_p=top_p,
            max_new_tokens=max_new_tokens, thinking_budget=thinking_budget, limit=limit, seed=seed, out=target,
            force=force, numerics="fast" if fast else "exact", overrides=set_ or (),
        )  # fmt: skip
        notes = SafeConsole(stderr=True, soft_wrap=True)
        found = evaluate_suite(checkpoint, asked, note=lambda line: notes.print(line, highlight=False))
        out.print_json(json.dumps(found.metrics)) if as_json else out.print(render(found))
        return
    given = {
        "--samples": samples, "--temperature": temperature, "--top-p": top_p, "--max-new-tokens": max_new_tokens,
        "--data": data, "--limit": limit or None, "--seed": seed or None, "--out": target, "--force": force or None,
        "--fast": fast or None,
    }  # fmt: skip
    _require_no_suite_options(given)
    _evaluate_heldout(checkpoint, recipe or _own_recipe(checkpoint), set_ or (), thinking_budget, as_json)


def _require_no_suite_options(given: Mapping[str, object]) -> None:
    """UserError for what would do nothing: held-out tasks of a recipe are asked as the recipe says."""
    for option, value in given.items():
        if value is not None:
            key = IN_A_RECIPE.get(option)
            instead = f"Set it in the recipe, --set {key}=..., or" if key else "Leave it out, or"
            raise UserError(
                f"{option} is about suites, and held-out tasks are asked as their recipe says. {instead} give --suite"
            )


def _own_recipe(checkpoint: Path) -> Path:
    """That of the run, or of the run that a checkpoint belongs to."""
    for folder in (checkpoint, *checkpoint.resolve().parents[:3]):
        if (folder / "run.db").is_file():
            return folder / "config.toml"
    raise UserError(
        f"{checkpoint} belongs to no run, so nothing says what to ask it. Give a suite, e.g. "
        f"temper eval {checkpoint} --suite gsm8k, or a recipe with a [heldout] table: temper eval {checkpoint} RECIPE"
    )


def _evaluate_heldout(
    checkpoint: Path, recipe: Path, overrides: Sequence[str], thinking_budget: int | None, as_json: bool
) -> None:
    import dataclasses

    from temper.config import load_recipe

    load_recipe(recipe, overrides)  # first: a mistake in it needs no torch to be found
    with importing():
        from temper.commands.checkpoints import evaluate_checkpoint

    results = evaluate_checkpoint(checkpoint, recipe, overrides=overrides, thinking_budget=thinking_budget)
    if as_json:
        out.print_json(json.dumps([dataclasses.asdict(result) for result in results]))
        return
    table = Table("held out", "score", "95% interval", "prompts", "samples each", "commonest answer")
    for result in results:
        interval = f"{result.low:.1%} to {result.high:.1%}"
        counts = (str(result.num_prompts), str(result.samples_per_prompt))
        table.add_row(result.name, f"{result.score:.1%}", interval, *counts, f"{result.constant_score:.1%}")
    out.print(table)
