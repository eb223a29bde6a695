"""`temper plan`: what a recipe needs of a GPU, before it runs.

Heavy imports happen inside the verb, so --help is instant.
"""

from __future__ import annotations

from typing import Annotated

import typer

from temper.cli.console import Overrides, Recipe, app, importing, out
from temper.commands.progress import show_work
from temper.errors import UserError


@app.command()
def plan(
    recipe: Recipe,
    gpu: Annotated[str, typer.Option(help="h200, h100-80, a100-40, l40s, 4090, ...; default: this machine's")] = "",
    gpus: Annotated[int, typer.Option(help="GPUs that training is spread over; only 1 is possible today")] = 1,
    set_: Overrides = None,
) -> None:
    """Bytes by part and phase, seconds by part, and settings that fit: of every stage, without its weights."""
    if gpus != 1:
        raise UserError(
            f"--gpus {gpus}: Temper trains on one GPU today, so a plan for several would promise what cannot run. "
            "Leave it out; what does not fit on one is told with the change that makes it fit"
        )
    from temper.config import load_recipe
    from temper.planning.gpus import find_gpu

    load_recipe(recipe, set_ or ())  # first: a mistake in it needs no torch to be found
    if gpu:
        find_gpu(gpu)
    with importing():
        from temper.commands.plan import plan_recipe
    with show_work(f"planning {recipe}"):
        tables, misfits = plan_recipe(recipe, overrides=set_ or (), gpu=gpu)
    for table in tables:
        out.print(table, highlight=False)
        out.print()
    if misfits:
        raise UserError("\n".join(misfits))
