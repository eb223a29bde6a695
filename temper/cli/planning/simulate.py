"""`temper simulate`: how fast a recipe would run on other GPUs, more of them, or with another bound S.

Heavy imports happen inside the verb, so --help is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from temper.cli.console import Overrides, Recipe, app, importing, note, out
from temper.commands.progress import show_work
from temper.errors import UserError
from temper.simulate.lengths import read_lengths
from temper.simulate.speeds import with_given

MOST_GPUS = 1000


@app.command()
def simulate(
    recipe: Recipe,
    gpu: Annotated[str, typer.Option(help="Speeds by the planner's roofline: h200, h100-80, 4090, ...")] = "",
    like: Annotated[Path | None, typer.Option(help="Speeds and lengths of this finished run, e.g. runs/demo")] = None,
    speed: Annotated[
        list[str] | None, typer.Option(metavar="NAME=SECONDS", help="One speed by name, e.g. decode_step=0.02")
    ] = None,
    lengths: Annotated[
        str,
        typer.Option(
            help="fixed:TOKENS, uniform:LOW:HIGH, lognormal:MEAN:SPREAD, tail:TOKENS:SHARE:TIMES, or groups:... for "
            "whole groups that are long"
        ),
    ] = "",
    gpus: Annotated[str, typer.Option(help="How many, up to 1000; several: 1,8,64")] = "1",
    staleness: Annotated[str, typer.Option(help="Bounds S; 0 is synchronous")] = "0,1,2,4,8",
    trainers: Annotated[int, typer.Option(help="GPUs of the trainer where S > 0; 0: what suits both sides")] = 0,
    steps: Annotated[int, typer.Option(help="Steps that are counted after the first ones; 0: 4 to 20, by size")] = 0,
    seed: Annotated[int, typer.Option(help="Of lengths")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Write a picture, e.g. simulated.svg")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable")] = False,
    set_: Overrides = None,
) -> None:
    """Seconds a step, throughput, idle shares and staleness, by the real loop over a virtual clock; nothing is drawn.

    The last stage of the recipe that trains on what it draws by its reward is simulated.
    """
    from temper.config import load_recipe

    load_recipe(recipe, set_ or ())  # first: mistakes need no torch to be found
    given = dict(_speed(text) for text in speed or ())
    counts, bounds = _numbers(gpus, "--gpus", 1, MOST_GPUS), _numbers(staleness, "--staleness", 0, 1000)
    _check_speeds(gpu, like, given)
    if lengths:
        read_lengths(lengths, seed)
    if steps < 0:
        raise UserError(f"--steps {steps}: count 1 or more, or leave it out")
    with importing():
        from temper.commands.simulate import SimulationRequest, simulate_recipe
        from temper.simulate import table
    asked = SimulationRequest(
        gpu=gpu, like=like, given=given, gpus=counts, staleness=bounds, trainers=trainers, lengths=lengths,
        steps=steps, seed=seed,
    )  # fmt: skip
    with show_work(f"simulating {recipe}") as work:
        answer = simulate_recipe(
            recipe, asked, overrides=set_ or (), tell=lambda what: work.rename(f"simulating {recipe}: {what}")
        )
    if plot is not None:
        plot.write_text(table.draw_runs(answer.runs), encoding="utf-8")
    if as_json:
        out.print_json(table.as_json(answer.runs, answer.speeds))
        return
    out.print(table.render_runs(answer.runs, answer.title), highlight=False)
    note(f"speeds: {table.describe_speeds(answer.speeds[0])}")
    if plot is not None:
        note(f"saved: {plot}")


def _check_speeds(gpu: str, like: Path | None, given: dict[str, float]) -> None:
    from temper.planning.gpus import find_gpu
    from temper.runs.reader import RunReader

    if gpu and like is not None:
        raise UserError("--gpu and --like both say how fast it is: use one of them, and --speed for single numbers")
    if gpu:
        find_gpu(gpu)
    elif like is None:
        with_given(None, given)
    if like is not None:
        RunReader(like).close()


def _numbers(text: str, option: str, least: int, most: int) -> list[int]:
    """ "1,8,64" as numbers."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and least <= int(part) <= most for part in parts):
        raise UserError(f'{option} "{text}": use numbers from {least} to {most}, e.g. 1,8,64')
    return list(dict.fromkeys(int(part) for part in parts))


def _speed(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name.strip(), float(value)
    except ValueError:
        raise UserError(f'--speed "{text}": write NAME=SECONDS, e.g. decode_step=0.02') from None
