"""`temper sweep`: a recipe with many settings.

Heavy imports happen inside the verb, so --help is instant.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from temper.cli.console import Recipe, app, note, out


@app.command()
def sweep(
    recipe: Recipe,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE,VALUE", help="Values of a key, separated by commas; one: for all runs"
        ),
    ] = None,
    random: Annotated[int, typer.Option(help="So many combinations by chance; 0: all of them")] = 0,
    parallel: Annotated[int, typer.Option(help="Runs at the same time")] = 1,
    folder: Annotated[Path | None, typer.Option("--out", help="Of all its runs; default runs/NAME-sweep")] = None,
    seed: Annotated[int, typer.Option(help="Of the choice with --random")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable")] = False,
) -> None:
    """Train a recipe with every combination of some settings, and compare held-out scores.

    Repeat the command to go on: finished runs are not run again. OUT/sweep.html shows the same table, and curves.
    """
    from temper.commands.training.sweep import is_done, run_sweep, sweep_points
    from temper.config import load_recipe
    from temper.errors import BackendError
    from temper.runs.report.sweep_table import header, order_rows, read_row, render_page, row_cells, tie_line

    folder = folder or Path("runs") / f"{load_recipe(recipe)[0].name}-sweep"
    points = sweep_points(recipe, set_ or (), folder, num_random=random, seed=seed)
    run_sweep(recipe, points, parallel=parallel, note=(lambda line: None) if as_json else note)
    rows = order_rows([read_row(point.folder, point.values) for point in points])
    page = folder / "sweep.html"
    page.write_text(render_page(f"{recipe.name}: {len(rows)} runs", rows))
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        table = Table(*header(rows))
        for row in rows:
            table.add_row(*row_cells(row))
        out.print(table)
        out.print(tie_line(rows), highlight=False)
        out.print(f"{page} has this table and the curves; temper watch {folder} has everything.", highlight=False)
    if unfinished := [point for point in points if not is_done(point)]:
        raise BackendError(
            f"{len(unfinished)} of {len(points)} runs are not finished. {unfinished[0].log} says why the first is not; "
            "repeat the command to go on with them"
        )
