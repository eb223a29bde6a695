"""`temper train`: trains a recipe.

Heavy imports happen inside the verb, so --help is instant.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from temper.cli.console import Overrides, Recipe, app, out, saying

UNFINISHED = 4
"""Exit code of a training that an alarm stopped: only a run that reached its last step ends with 0."""


@app.command()
def train(
    recipe: Recipe,
    set_: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything that needs no weights, then stop.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the run stopped.")] = False,
    run: Annotated[Path | None, typer.Option(help="Run directory; default runs/NAME")] = None,
) -> None:
    """Train a recipe: all its stages, in order."""
    if dry_run:
        from temper.commands.training.preflight import dry_run as check

        out.print(check(recipe, overrides=set_ or ()))
        out.print("\nNothing was trained. Everything that can be checked without weights is in order.")
        return
    from temper.config import load_recipe

    name = load_recipe(recipe, set_ or ())[0].name  # first: a mistake in a recipe need not wait for torch
    with saying("loading torch and transformers"):
        from temper.commands.training.stopping import Stopped, describe_stop
        from temper.commands.training.train import choose_folder, is_finished
        from temper.commands.training.train import train as run_training
        from temper.runs.report.report import make_report, render
    run = run or choose_folder(name, resume=resume)
    try:
        folder = run_training(recipe, overrides=set_ or (), run=run, resume=resume)
    except Stopped as stop:
        changes = [word for change in set_ or () for word in ("--set", change)]
        again = shlex.join(["temper", "train", str(recipe), *changes, "--run", str(run), "--resume"])
        out.print(f"\n{stop} {describe_stop(run)}. Go on with:\n  {again}")
        raise typer.Exit(stop.exit_code) from stop
    out.print(render(make_report(folder)))
    out.print(f"\nThe run is in {folder}. Look at it:")
    out.print(f"  temper watch {folder}           curves, rollouts and tokens in the browser")
    out.print(f"  temper report {folder}          numbers, intervals, time split")
    out.print(f"  temper sample {folder}          talk to the trained model")
    out.print(f"  temper export {folder} OUT      an ordinary Hugging Face directory")
    if not is_finished(folder):
        out.print("\nThe run is not finished: go on with --resume.")
        raise typer.Exit(UNFINISHED)
