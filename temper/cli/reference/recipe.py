"""`temper recipe`: the keys of a recipe explained.

Heavy imports happen inside the verb, so --help is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from temper.cli.console import app, out


@app.command()
def recipe(
    key: Annotated[str | None, typer.Argument(help="A key or a section, e.g. optim or optim.learning_rate")] = None,
    page: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write recipe.md")] = None,
) -> None:
    """List the keys of a recipe with type and default, explain one, or write the page that explains all."""
    from temper.commands.pages.recipe import explain, list_keys, write_page

    if page is not None:
        out.print(f"{write_page(page)} is written")
    elif key is not None:
        out.print(explain(key), highlight=False)
    else:
        out.print(list_keys())
        out.print('"temper recipe KEY" explains a key or a section; docs/recipe.md has them all on one page.')
