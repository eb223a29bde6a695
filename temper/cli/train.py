"""`temper train`: trains a recipe.

Heavy imports happen inside the verb, so --help is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from temper.cli.console import Overrides, Recipe, app, importing, out
from temper.commands.progress import show_work
from temper.errors import DiskFull, command_line

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
    ray_address: Annotated[
        str, typer.Option(help='A Ray cluster to run on, e.g. "auto": cluster.place = "ray" and its address')
    ] = "",
) -> None:
    """Train a recipe: all its stages, in order."""
    from temper.config import load_recipe

    if ray_address:
        set_ = [*(set_ or ()), "cluster.place=ray", f"cluster.address={ray_address}"]
    name = load_recipe(recipe, set_ or ())[0].name  # first: a mistake in it needs no torch to be found
    if dry_run:
        with importing():
            from temper.commands.training.preflight import count_doubts
            from temper.commands.training.preflight import dry_run as check
        with show_work(f"checking {recipe}"):
            found = check(recipe, overrides=set_ or ())
        out.print(found)
        doubts = count_doubts(found)
        named = (
            f"{doubts} {'doubt is' if doubts == 1 else 'doubts are'} named above; all else" if doubts else "Everything"
        )
        out.print(f"\nNothing was trained. {named} that can be checked without weights is in order.")
        return
    from temper.commands.starts import undo_failed_start

    with importing():
        from temper.commands.training.ranks import follow_if_started_so
        from temper.commands.training.stopping import Stopped, describe_stop
        from temper.commands.training.train import choose_folder, is_finished
        from temper.commands.training.train import train as run_training
        from temper.runs.report.report import make_report, render

    follow_if_started_so()
    run = run or choose_folder(name, resume=resume)
    changes = [word for change in set_ or () for word in ("--set", change)]
    again = command_line("temper", "train", str(recipe), *changes, "--run", str(run), "--resume")
    try:
        with undo_failed_start(run):
            folder = run_training(recipe, overrides=set_ or (), run=run, resume=resume)
    except Stopped as stop:
        out.print(f"\n{stop} {describe_stop(run)}. Go on with:\n  {again}")
        raise typer.Exit(stop.exit_code) from stop
    except DiskFull as full:
        raise DiskFull(f"{full}:\n  {again}") from full
    out.print(render(make_report(folder)))
    out.print(f"\nThe run is in {folder}. Look at it:\n{_next_commands(folder)}", highlight=False)
    if not is_finished(folder):
        out.print("\nThe run is not finished: go on with --resume.")
        raise typer.Exit(UNFINISHED)


def _next_commands(folder: Path) -> str:
    """What to type next, in a form that also works where the environment is not active."""
    verbs = {
        ("watch", str(folder)): "curves, rollouts and tokens in the browser",
        ("report", str(folder)): "numbers, intervals, time split",
        ("sample", str(folder)): "talk to the trained model",
        ("export", str(folder), "OUT"): "an ordinary Hugging Face directory",
    }
    lines = {command_line("temper", *words): meaning for words, meaning in verbs.items()}
    width = max(map(len, lines))
    return "\n".join(f"  {line:<{width}}   {meaning}" for line, meaning in lines.items())
