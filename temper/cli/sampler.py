"""`temper sampler`: draws for runs that reach it by its address.

Heavy imports happen inside the verb, so --help is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from temper.cli.console import app, importing, out


@app.command()
def sampler(
    model: Annotated[
        Path | None, typer.Argument(help="This machine's copy of the model; default: the run's own folder")
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address; others than this machine need e.g. 0.0.0.0:29600")
    ] = "127.0.0.1:29600",
) -> None:
    """Draw for runs whose cluster.samplers names this address, one after the other."""
    with importing():
        from temper.cluster.listener import stand_at

    stand_at(listen, model, lambda line: out.print(line, highlight=False))
