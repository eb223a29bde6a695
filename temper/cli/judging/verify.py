"""`temper verify`: how often a verifier is wrong.

Heavy imports happen inside the verb, so --help is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from temper.cli.console import app, out


@app.command()
def verify(
    kind: Annotated[str, typer.Argument(help="A kind of reward: math, code, format ...")],
    golden: Annotated[Path | None, typer.Option(help="Your own golden set; default: the shipped one")] = None,
    attack: Annotated[bool, typer.Option("--attack", help="Run the attack pack: none may score")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="math: beside math-verify and equal strings")] = False,
    options: Annotated[str, typer.Option(help="Options of the reward, as JSON")] = "{}",
) -> None:
    """How often a verifier is wrong on a golden set, with intervals; or whether attacks score."""
    from temper.commands.judging import verify as command

    result = command.verify(kind, golden=golden, attack=attack, options=command.read_options(options))
    out.print(command.render(result))
    if compare:
        out.print(command.compare(result))
    if not result.is_fine:
        raise typer.Exit(1)
