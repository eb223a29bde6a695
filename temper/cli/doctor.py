"""`temper doctor`: what is installed and what would run.

Heavy imports happen inside the verb, so --help is instant.
"""

from __future__ import annotations

from rich.table import Table

from temper.cli.console import app, out


@app.command()
def doctor() -> None:
    """What is installed, what would run, and how to install what is missing."""
    from temper.commands.doctor import examine

    table = Table("part", "", "detail")
    for what, is_fine, detail in examine():
        table.add_row(what, "ok" if is_fine else "-", detail)
    out.print(table)
