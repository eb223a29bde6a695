"""`temper env check`: whether a recipe's environment is fit to be trained in.

Heavy imports happen inside the verb, so --help is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from temper.cli.console import Overrides, Recipe, env_app, importing, out


@env_app.command("check")
def check(
    recipe: Recipe,
    tasks: Annotated[int, typer.Option(min=1, help="Training tasks that are tried")] = 16,
    checkpoint: Annotated[Path | None, typer.Option(help="A policy that plays, to see what it could learn")] = None,
    draws: Annotated[int, typer.Option(min=2, help="Of each task by that policy")] = 8,
    set_: Overrides = None,
) -> None:
    """Tries a recipe's environment and reward: a table of verdicts, and exit code 1 when something is wrong."""
    with importing():
        from temper.commands.judging.environment import check_recipe, render

    found = check_recipe(recipe, num_tasks=tasks, checkpoint=checkpoint, draws=draws, overrides=set_ or ())
    out.print(render(found))
    if any(verdict.is_fine is False for verdict in found):
        raise typer.Exit(1)
