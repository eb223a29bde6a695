"""`temper best`: the best of several answers.

Heavy imports happen inside the verb, so --help is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from temper.cli.console import Overrides, app, importing, note, out, require_checkpoint
from temper.cli.judging.options import Data, Fast, Limit, Suite, require_suite


@app.command()
def best(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint or run directory")],
    prompts: Annotated[list[str] | None, typer.Argument(help="Texts, or files of tasks; default: the suite's")] = None,
    suite: Suite = "",
    data: Data = None,
    reward: Annotated[str, typer.Option(help="Kind of reward to choose by; default: the suite's")] = "",
    options: Annotated[str, typer.Option(help="Options of the reward, as JSON")] = "{}",
    n: Annotated[int, typer.Option("--n", min=1, help="Answers to choose among")] = 8,
    answer_field: Annotated[str, typer.Option(help="Column of a file with gold answers; default: none")] = "",
    temperature: Annotated[float | None, typer.Option(min=0.0)] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    limit: Limit = 0,
    seed: int = 0,
    fast: Fast = False,
    target: Annotated[Path | None, typer.Option("--out", help="File for all answers, one JSON object a line")] = None,
    set_: Overrides = None,
) -> None:
    """Best-of-N: draws N answers to each prompt and gives the one that a reward likes most."""
    require_checkpoint(checkpoint)
    require_suite(suite, data, set_)
    with importing():
        from temper.commands.judging import verify as rewards
        from temper.commands.judging.best import BestRequest, render
        from temper.commands.judging.best import best as draw
        from temper.commands.judging.evaluate import SuiteRequest

    asked = SuiteRequest(
        suite=suite, data=data, temperature=temperature, max_new_tokens=max_new_tokens, limit=limit, seed=seed,
        numerics="fast" if fast else "exact", overrides=set_ or (),
    )  # fmt: skip
    wanted = BestRequest(
        prompts=tuple(prompts or ()), reward=reward, options=rewards.read_options(options), n=n,
        answer_field=answer_field,
    )  # fmt: skip
    out.print(render(draw(checkpoint, asked, wanted, out=target, note=note)))
