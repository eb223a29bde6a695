"""`temper rollouts`: what a run's policy said, in the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from temper.cli.console import app, out


@app.command()
def rollouts(
    run: Annotated[Path, typer.Argument(help="A run directory, live or finished")],
    num: Annotated[int, typer.Option("--num", "-n", min=1, help="How many, newest first")] = 5,
    step: Annotated[int | None, typer.Option(min=0, help="Of this step alone")] = None,
    stage: Annotated[int | None, typer.Option(min=1, help="Of this stage alone; the first is 1")] = None,
    find: Annotated[str | None, typer.Option(metavar="TEXT", help="With this text in prompt or answer")] = None,
    task: Annotated[str | None, typer.Option(help="Of tasks with this in their name")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Paid at least this")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Paid at most this")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON each")] = False,
) -> None:
    """What the policy said and what it was paid, newest first."""
    from temper.commands.rollouts import read_rollouts, render
    from temper.dashboard.queries import RolloutFilter

    wanted = RolloutFilter(
        stage=None if stage is None else stage - 1,
        step=step,
        min_reward=min_reward,
        max_reward=max_reward,
        task=task,
        q=find,
    )
    found, has_more = read_rollouts(run, wanted, num)
    for line in (json.dumps(row, ensure_ascii=False) for row in found) if as_json else render(found, has_more=has_more):
        out.print(line, highlight=False)
