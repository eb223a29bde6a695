"""`temper label-steps`: labels for the steps of solutions.

Heavy imports happen inside the verb, so --help is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from temper.cli.console import app, importing, note, require_checkpoint
from temper.cli.judging.options import Data, Fast, Limit, Suite, require_suite


@app.command("label-steps")
def label_steps(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint or run directory, which continues the solutions")],
    target: Annotated[Path, typer.Option("--out", help="A .jsonl file that a reward_model stage reads")],
    suite: Suite = "",
    data: Data = None,
    continuations: Annotated[int, typer.Option(min=1, help="From the end of every step")] = 8,
    min_share: Annotated[float, typer.Option(help="Successes from which on a step is good; 0: one is enough")] = 0.0,
    separator: Annotated[str, typer.Option(help="Between two steps")] = "\n\n",
    samples: Annotated[int | None, typer.Option(min=1, help="Solutions of a task that brings none")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    limit: Limit = 0,
    seed: int = 0,
    fast: Fast = False,
) -> None:
    """Labels the steps of solutions by how often the model succeeds from there: data for a process reward model."""
    require_checkpoint(checkpoint)
    require_suite(suite, data)
    with importing():
        from temper.commands.judging.evaluate import SuiteRequest
        from temper.commands.judging.label_steps import label_steps as label
        from temper.stages.step_labels import Labelling

    asked = SuiteRequest(
        suite=suite, data=data, samples=samples, max_new_tokens=max_new_tokens, limit=limit, seed=seed,
        numerics="fast" if fast else "exact",
    )  # fmt: skip
    label(
        checkpoint,
        asked,
        Labelling(separator=separator, samples=continuations, min_share=min_share),
        out=target,
        note=note,
    )
