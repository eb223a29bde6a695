"""`temper presets`: objectives explained.

Heavy imports happen inside the verb, so --help is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from temper.cli.console import app, out


@app.command()
def presets(
    name: Annotated[str | None, typer.Argument(help="Explain one objective")] = None,
    compare: Annotated[tuple[str, str] | None, typer.Option(metavar="ONE OTHER", help="What differs")] = None,
    page: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write objectives.md and its pictures")] = None,
) -> None:
    """List the objectives, explain one, compare two, or write the page that explains all."""
    from temper.config.preset_names import why_unknown
    from temper.errors import UserError

    for asked in [*([name] if name else []), *(compare or ())]:
        if why := why_unknown(asked):  # before torch is imported
            raise UserError(why)
    from temper.objectives import FAMILIES, describe
    from temper.objectives import compare as differences

    if page is not None:
        from temper.commands.pages.objectives import write_page

        out.print(f"{write_page(page)} and its pictures are written")
    elif compare is not None:
        table = Table("factor", *compare)
        for row in differences(*compare):
            table.add_row(*row)
        out.print(table)
    elif name is not None:
        out.print(describe(name))
    else:
        table = Table("preset", "", "source")
        for title, family in FAMILIES.items():
            table.add_section()
            table.add_row(Text(title, style="bold"), "", "")
            for preset in family:
                table.add_row(preset.name, "experimental" if preset.why_experimental else "", preset.source)
        out.print(table)
        out.print('"temper presets NAME" explains one; "temper presets --compare ONE OTHER" shows what differs.')
