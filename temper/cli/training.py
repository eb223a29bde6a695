"""Training a recipe and looking at the run.

Heavy imports happen inside the verbs, so --help is instant.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from temper.cli.console import Overrides, Recipe, app, out
from temper.errors import UserError

UNFINISHED = 4
"""Exit code of a training that an alarm stopped: only a run that reached its last step ends with 0."""


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Where to write; made if it is not there")] = Path("."),
) -> None:
    """Write a commented recipe, a reward and five rows of data: something that trains at once, to change."""
    from temper.commands.init import init as write_files

    for path in write_files(folder):
        out.print(f"wrote {path}", highlight=False)
    recipe = folder / "recipe.toml"
    out.print(f"\n  temper train {recipe} --dry-run     checks everything in seconds", highlight=False)
    out.print(f"  temper train {recipe}               trains", highlight=False)


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
    from temper.commands.training.stopping import Stopped, describe_stop
    from temper.commands.training.train import choose_folder, is_finished
    from temper.commands.training.train import train as run_training
    from temper.config import load_recipe
    from temper.runs.report.report import make_report, render

    run = run or choose_folder(load_recipe(recipe, set_ or ())[0].name, resume=resume)
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


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run directory, live or finished")],
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable")] = False,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all metrics as a .csv table")] = None,
    parquet: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all metrics as a .parquet table")] = None,
    wide: Annotated[bool, typer.Option("--wide", help="Tables with a row per step, not per number")] = False,
) -> None:
    """What a run did: held-out scores with intervals, steps, tokens, time split, sha256 of the weights."""
    from temper.runs.report.report import as_json as report_json
    from temper.runs.report.report import make_report, render

    if csv is not None or parquet is not None:
        from temper.runs.report.export import export_metrics

        for target in (path for path in (csv, parquet) if path is not None):
            num_rows = export_metrics(run, target, form="wide" if wide else "long")
            out.print(f"{target}: {num_rows:,} rows")
        return
    result = make_report(run)
    out.print_json(report_json(result)) if as_json else out.print(render(result))
    if result.damage:
        raise UserError(result.damage)


@app.command()
def watch(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN_OR_FOLDER...", help="Runs, or folders of runs")],
    host: Annotated[str, typer.Option(help="Address; others than this machine need e.g. 0.0.0.0")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one")] = 8777,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser")] = False,
) -> None:
    """Look at runs in the browser while they are trained, or afterwards. Reads only."""
    from temper.commands.watch import watch as serve_dashboard

    serve_dashboard(
        paths,
        host=host,
        port=port,
        open_browser=open_,
        say=lambda line: out.print(line, highlight=False),
    )
