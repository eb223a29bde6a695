"""What all verbs share: the application they register with, and where they print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from temper.terminal import SafeConsole

app = typer.Typer(
    help="Reinforcement-learning post-training of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Models to start from.", no_args_is_help=True)
app.add_typer(model_app, name="model")
out = SafeConsole(soft_wrap=True)

Overrides = Annotated[list[str] | None, typer.Option("--set", help="Change a key: --set optim.learning_rate=1e-5")]
Recipe = Annotated[Path, typer.Argument(help="A recipe, e.g. recipes/demo.toml", show_default=False)]


def note(line: str) -> None:
    out.print(line, highlight=False)
