"""Options that several judging verbs share, and the check of a suite before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

Suite = Annotated[str, typer.Option(help="Name of a suite, or your own .toml file")]
Data = Annotated[Path | None, typer.Option(help="The suite's published file; default: the shipped sample")]
Limit = Annotated[int, typer.Option(min=0, help="Only the first prompts; 0: all")]
Fast = Annotated[bool, typer.Option("--fast", help="Faster; the last digits depend on what is batched")]


def require_suite(name: str, data: Path | None = None, overrides: Sequence[str] | None = None) -> None:
    """UserError for a suite that is not there: before seconds of imports, not after them. Empty: none is asked for."""
    if name:
        from temper.evals.suites import load_suite

        load_suite(name, data=data, overrides=overrides or ())
