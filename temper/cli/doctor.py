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

    findings = examine()
    table = Table("part", "", "detail")
    for found in findings:
        table.add_row(found.what, "ok" if found.is_fine else "-", found.detail)
    out.print(table)
    # Below the table, each on one line: a command that a cell has wrapped cannot be copied.
    for found in findings:
        if found.remedy:
            out.print(f"{found.what}:  {found.remedy}", highlight=False)
