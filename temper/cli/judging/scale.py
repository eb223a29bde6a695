"""`temper scale`: accuracy against tokens.

Heavy imports happen inside the verb, so --help is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from temper.cli.console import Overrides, app, importing, note, out, require_checkpoint
from temper.cli.judging.options import Data, Fast, Limit, Suite, require_suite


@app.command()
def scale(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint or run directory")],
    suite: Suite,
    modes: Annotated[str, typer.Option(help="best_of, majority, budget, refine")] = "best_of,majority,budget,refine",
    data: Data = None,
    samples: Annotated[int, typer.Option(min=1, help="Of best_of and majority, per prompt")] = 8,
    budgets: Annotated[str, typer.Option(help="Thinking tokens, e.g. 64,32-256; default: from the limit")] = "",
    rounds: Annotated[int, typer.Option(min=0, help="Of refinement")] = 3,
    continuation: Annotated[str, typer.Option(help="In the place of an end that comes too early")] = "\nWait",
    answer_prefix: Annotated[str, typer.Option(help="Behind thoughts that are cut")] = "\n\nFinal answer:",
    think_end: Annotated[str, typer.Option(help='The model\'s mark of the end of thought, e.g. "</think>"')] = "",
    limit: Limit = 0,
    seed: int = 0,
    fast: Fast = False,
    target: Annotated[Path, typer.Option("--out", help="Directory of the curves and the numbers")] = Path("scaling"),
    set_: Overrides = None,
) -> None:
    """Test-time scaling: accuracy against tokens for best-of-N, majority, budget forcing and refinement."""
    require_checkpoint(checkpoint)
    require_suite(suite, data, set_)
    with importing():
        from temper.commands.judging.evaluate import SuiteRequest
        from temper.commands.judging.scale import Ways, parse_budgets, render
        from temper.commands.judging.scale import scale as run_modes
        from temper.evals.scaling import ThinkingBudget

    shape = ThinkingBudget(max_tokens=1, continuation=continuation, answer_prefix=answer_prefix, think_end=think_end)
    ways = Ways(
        modes=tuple(filter(None, (mode.strip() for mode in modes.split(",")))),
        samples=samples,
        shape=shape,
        budgets=parse_budgets(budgets, shape),
        rounds=rounds,
    )
    numerics: Literal["exact", "fast"] = "fast" if fast else "exact"
    asked = SuiteRequest(suite=suite, data=data, limit=limit, seed=seed, numerics=numerics, overrides=set_ or ())
    out.print(render(run_modes(checkpoint, asked, ways, out=target, note=note)))
