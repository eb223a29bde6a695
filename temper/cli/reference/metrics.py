"""`temper metrics`: metrics explained.

Heavy imports happen inside the verb, so --help is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from temper.cli.console import app, out


@app.command()
def metrics(
    name: Annotated[str | None, typer.Argument(help="Explain one metric, e.g. policy/kl_ref_k3")] = None,
    page: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write metrics.md")] = None,
) -> None:
    """List the metrics, explain one, or write the page that explains all."""
    from temper.commands.pages.metrics import explain, write_page
    from temper.errors import UserError
    from temper.runs.metrics import METRICS, describe

    if page is not None:
        out.print(f"{write_page(page)} is written")
    elif name is not None:
        found = describe(name)
        if found is None:
            raise UserError(f'metric "{name}" is unknown. Run "temper metrics" to list all')
        out.print(explain(found))
    else:
        table = Table("metric", "unit", "meaning")
        for metric in METRICS:
            table.add_row(metric.name, metric.unit, metric.meaning)
        out.print(table)
