"""What all verbs share: the application they register with, where they print, and that they run once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from temper.commands.launchers import require_one_process
from temper.terminal import SafeConsole

READERS = ("report", "watch", "presets", "metrics", "doctor")
"""Verbs that load no model: they may run in any process."""
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


@app.callback()
def refuse_launchers(context: typer.Context) -> None:
    if context.invoked_subcommand not in READERS:
        require_one_process(f'"temper {context.invoked_subcommand} ..."')


@contextmanager
def saying(what: str) -> Iterator[None]:
    """Says on a terminal what a verb does before it has anything to show: importing torch alone takes seconds."""
    with out.status(f"{what} ..."):
        yield


def note(line: str) -> None:
    out.print(line, highlight=False)
