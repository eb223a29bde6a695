"""`temper compare`: two checkpoints on the same questions.

Heavy imports happen inside the verb, so --help is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from temper.cli.console import Overrides, app, importing, note, out, require_checkpoint
from temper.cli.judging.options import Data, Fast, Limit, Suite, require_suite


@app.command()
def compare(
    base: Annotated[Path, typer.Argument(help="A result of temper eval --suite, or a checkpoint or run directory")],
    trained: Annotated[Path, typer.Argument(help="The same, after training")],
    suite: Suite = "",
    data: Data = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Of each prompt; default 64")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0)] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    limit: Limit = 0,
    seed: int = 0,
    fast: Fast = False,
    target: Annotated[Path, typer.Option("--out", help="Directory of the page, the picture and the numbers")] = Path(
        "comparison"
    ),
    set_: Overrides = None,
) -> None:
    """What training did: paired differences with intervals, pass@k curves, a verdict; one HTML page."""
    for path in (base, trained):
        if not path.is_file():  # a result that was saved
            require_checkpoint(path)
    require_suite(suite, data, set_)
    with importing():
        from temper.commands.judging.compare import compare_models, render
        from temper.commands.judging.evaluate import SuiteRequest

    asked = SuiteRequest(
        suite=suite, data=data, samples=samples, temperature=temperature, max_new_tokens=max_new_tokens, limit=limit,
        seed=seed, numerics="fast" if fast else "exact", overrides=set_ or (),
    )  # fmt: skip
    out.print(render(compare_models(base, trained, asked, out=target, note=note)))
