"""`temper export`: an ordinary Hugging Face directory.

Heavy imports happen inside the verb, so --help is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from temper.cli.console import app, importing, out, require_checkpoint


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint or run directory")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="New directory")],
) -> None:
    """Write an ordinary Hugging Face directory, checked by logits against plain transformers."""
    require_checkpoint(checkpoint)
    with importing():
        from temper.commands.checkpoints import export as export_checkpoint

    gap = export_checkpoint(checkpoint, target)
    out.print(f"{target}: logits equal to those of plain transformers within {gap:.2g}")
