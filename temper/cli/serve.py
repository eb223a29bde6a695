"""`temper serve`: a checkpoint over HTTP.

Heavy imports happen inside the verb, so --help is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from temper.cli.console import app, importing, out, require_checkpoint


@app.command()
def serve(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint or run directory")],
    host: Annotated[str, typer.Option(help="Address; others than this machine need e.g. 0.0.0.0")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one")] = 8000,
    name: Annotated[str, typer.Option(help="What clients call the model; default: the directory's name")] = "",
    api_key: Annotated[str, typer.Option(help="Clients must send it; default: TEMPER_API_KEY")] = "",
    record: Annotated[Path | None, typer.Option(help="SQLite file for tokens, log-probs, versions")] = None,
    max_running: Annotated[int, typer.Option(min=1, help="Completions drawn together")] = 32,
    max_waiting: Annotated[int, typer.Option(min=0, help="Completions that may queue; more get 429")] = 256,
    context: Annotated[int, typer.Option(min=0, help="Longest sequence; default: the model's")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    seed: int = 0,
    shutdown_seconds: Annotated[float, typer.Option(min=1, help="For what is in flight, after SIGTERM")] = 30.0,
) -> None:
    """Serve a checkpoint to OpenAI clients over HTTP."""
    require_checkpoint(checkpoint)
    with importing():
        from temper.commands.serve import ServeSettings
        from temper.commands.serve import serve as serve_checkpoint

    settings = ServeSettings(
        host=host, port=port, name=name, api_key=api_key, record=record, max_running=max_running,
        max_waiting=max_waiting, context=context, dtype=dtype, device=device, seed=seed,
        shutdown_seconds=shutdown_seconds,
    )  # fmt: skip
    serve_checkpoint(checkpoint, settings, lambda line: out.print(line, highlight=False))
