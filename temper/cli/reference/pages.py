"""`temper pages`: the pages of docs/ that are written from the code.

Heavy imports happen inside the verb, so --help is instant.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from temper.cli.console import app, out


@app.command()
def pages(folder: Annotated[Path, typer.Argument(help="Where they stand: docs, from the root of a clone")]) -> None:
    """Write every page of the reference from the code: recipe keys, objectives, presets, rewards, and so on."""
    from typer.main import get_command

    from temper.commands.pages.reference import write_pages

    door = sys.modules[__name__.partition(".")[0]]  # what a user imports; here it is only read
    for path in write_pages(folder, get_command(app), door):
        out.print(f"wrote {path}", highlight=False)
