"""`temper plan`: what a recipe needs of one GPU or many, before it runs.

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
    gpus: Annotated[int, typer.Option(help="How many of them, for trainers and samplers together")] = 1,
    set_: Overrides = None,
) -> None:
    """Bytes by part and phase, seconds by part, and settings that fit: of every stage, without its weights.

    For several GPUs it proposes who trains and who draws, unless the recipe's [cluster] table says so.
    """
    from temper.config import load_recipe
    from temper.planning.gpus import MOST_GPUS, find_gpu

    if not 1 <= gpus <= MOST_GPUS:
        raise UserError(f"--gpus {gpus}: use 1 to {MOST_GPUS}")
    load_recipe(recipe, set_ or ())  # first: a mistake in it needs no torch to be found
    if gpu:
        find_gpu(gpu)
    with importing():
        from temper.commands.plan import plan_recipe
    with show_work(f"planning {recipe}"):
        tables, misfits = plan_recipe(recipe, overrides=set_ or (), gpu=gpu, gpus=gpus)
    for table in tables:
        out.print(table, highlight=False)
        out.print()
    if misfits:
        raise UserError("\n".join(misfits))
