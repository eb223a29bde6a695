"""`temper init`: a folder to start from.

Heavy imports happen inside the verb, so --help is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from temper.cli.console import app, out
from temper.errors import command_line


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Where to write; made if it is not there")] = Path("."),
) -> None:
    """Write a commented recipe, a reward and five rows of data: something that trains at once, to change."""
    from temper.commands.init import init as write_files

    for path in write_files(folder):
        out.print(f"wrote {path}", highlight=False)
    recipe = folder / "recipe.toml"
    train = command_line("temper", "train", str(recipe))
    out.print(f"\n  {train} --dry-run     checks everything in seconds", highlight=False)
    out.print(f"  {train}               trains", highlight=False)
