"""What all verbs share: the application they register with, where they print, and that they run once."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import typer

from temper.commands.find import find_model
from temper.commands.launchers import require_one_process
from temper.commands.progress import show_work
from temper.terminal import SafeConsole
from temper.version import __version__

READERS = (
    "report",
    "rollouts",
    "watch",
    "guide",
    "presets",
    "metrics",
    "recipe",
    "pages",
    "doctor",
    "plan",
    "simulate",
    "sampler",
)
"""Verbs that load no model: they may run in any process."""
app = typer.Typer(
    help="Reinforcement-learning post-training of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Models to start from.", no_args_is_help=True)
app.add_typer(model_app, name="model")
env_app = typer.Typer(help="Environments to train in.", no_args_is_help=True)
app.add_typer(env_app, name="env")
out = SafeConsole(soft_wrap=True)

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a key of every stage: optim.learning_rate=1e-5; of the second alone: stage.2.steps=50",
    ),
]
Recipe = Annotated[Path, typer.Argument(help="A recipe, e.g. recipes/demo.toml", show_default=False)]


def _say_version(is_asked: bool) -> None:
    if is_asked:
        out.print(f"temper {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def refuse_launchers(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_say_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand not in (*READERS, "train"):  # processes that train are ranks of one run
        require_one_process(f'"temper {context.invoked_subcommand} ..."')


def require_checkpoint(path: Path) -> None:
    """UserError for a path that leads to no checkpoint: before seconds of imports, not after them."""
    find_model(path)


def importing() -> AbstractContextManager[object]:
    """Around the imports of a verb that computes: they take seconds, and a silent terminal looks stuck."""
    return show_work("importing torch and transformers")


def note(line: str) -> None:
    out.print(line, highlight=False)
