"""`temper choose`: the checkpoint that RL should start from.

Heavy imports happen inside the verb, so --help is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from temper.cli.console import app, importing, note, out, require_checkpoint
from temper.cli.judging.options import Fast, Limit, require_suite


@app.command()
def choose(
    candidates: Annotated[list[Path], typer.Argument(help="Runs (all their checkpoints) or checkpoint directories")],
    suite: Annotated[list[str], typer.Option(help="Probe set of a domain; give one --suite for each")],
    k: Annotated[int, typer.Option("--k", min=1, help="Choose by pass@k")] = 8,
    average: Annotated[Path | None, typer.Option(help="Directory for the average of the chosen ones")] = None,
    stage: Annotated[str, typer.Option(help="Of a run, only checkpoints of this stage, e.g. sft")] = "",
    samples: Annotated[int | None, typer.Option(min=1, help="Of each prompt; default: k")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0)] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    limit: Limit = 0,
    seed: int = 0,
    fast: Fast = False,
    target: Annotated[Path, typer.Option("--out", help="Directory of the results")] = Path("choice"),
) -> None:
    """Which checkpoint RL should start from: the best of each domain by pass@k, and their average."""
    for path in candidates:
        if not (path / "run.db").is_file():  # of a run, all checkpoints are meant
            require_checkpoint(path)
    for name in suite:
        require_suite(name)
    with importing():
        from temper.commands.judging.choose import choose as rate
        from temper.commands.judging.choose import render
        from temper.commands.judging.evaluate import SuiteRequest

    probes = [
        SuiteRequest(
            suite=name, samples=samples, temperature=temperature, max_new_tokens=max_new_tokens, limit=limit,
            seed=seed, numerics="fast" if fast else "exact",
        )
        for name in suite
    ]  # fmt: skip
    out.print(render(rate(candidates, probes, k=k, out=target, average=average, stage=stage, note=note)))
