"""Options that several judging verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Suite = Annotated[str, typer.Option(help="Name of a suite, or your own .toml file")]
Data = Annotated[Path | None, typer.Option(help="The suite's published file; default: the shipped sample")]
Limit = Annotated[int, typer.Option(min=0, help="Only the first prompts; 0: all")]
Fast = Annotated[bool, typer.Option("--fast", help="Faster; the last digits depend on what is batched")]
