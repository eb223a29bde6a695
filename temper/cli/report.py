"""`temper report`: what a run achieved.

Heavy imports happen inside the verb, so --help is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from temper.cli.console import app, out
from temper.errors import UserError


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run directory, live or finished")],
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable")] = False,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all metrics as a .csv table")] = None,
    parquet: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all metrics as a .parquet table")] = None,
    wide: Annotated[bool, typer.Option("--wide", help="Tables with a row per step, not per number")] = False,
    overoptimization: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw reward and held-out verifier over KL as an .svg picture")
    ] = None,
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
    if overoptimization is not None:
        from temper.runs.report.overoptimization import describe_points, draw_points, proxy_points

        points = proxy_points(run)
        overoptimization.write_text(draw_points(points))
        out.print(f"{overoptimization}: {describe_points(points)}", highlight=False)
        return
    result = make_report(run)
    out.print_json(report_json(result)) if as_json else out.print(render(result))
    if result.damage:
        raise UserError(result.damage)
