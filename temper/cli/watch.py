"""`temper watch`: runs in the browser.

Heavy imports happen inside the verb, so --help is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from temper.cli.console import app, out


@app.command()
def watch(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN_OR_FOLDER...", help="Runs, or folders of runs")],
    host: Annotated[str, typer.Option(help="Address; others than this machine need e.g. 0.0.0.0")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one")] = 8777,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser")] = False,
) -> None:
    """Look at runs in the browser while they are trained, or afterwards. Reads runs, and keeps your notes on them."""
    from temper.commands.watch import watch as serve_dashboard

    serve_dashboard(
        paths,
        host=host,
        port=port,
        open_browser=open_,
        say=lambda line: out.print(line, highlight=False),
    )
