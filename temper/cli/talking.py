"""Using a checkpoint.

Heavy imports happen inside the verbs, so --help is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from temper.cli.console import app, out


@app.command()
def sample(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint or run directory")],
    prompt: Annotated[str | None, typer.Option(help="Ask once; without it you talk in the terminal")] = None,
    n: Annotated[int, typer.Option(min=1, help="Answers to the prompt")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    seed: int = 0,
) -> None:
    """Sample from a checkpoint, or talk to it."""
    import asyncio

    from temper.build.policy import Room, open_policy
    from temper.commands.checkpoints import find_model

    policy = open_policy(find_model(checkpoint), Room(seed=seed, max_running=min(n, 32)))

    async def talk() -> None:
        messages: list[dict[str, str]] = []
        while True:
            text = prompt if prompt is not None else input("you> ")
            messages.append({"role": "user", "content": text})
            (answers,) = await policy.answer([messages], n, temperature=temperature, max_new_tokens=max_new_tokens)
            for answer in answers:
                out.print(answer)
            if prompt is not None:
                return
            messages.append({"role": "assistant", "content": answers[0]})

    try:
        asyncio.run(talk())
    except (EOFError, KeyboardInterrupt):
        out.print()


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
    from temper.commands.serve import ServeSettings
    from temper.commands.serve import serve as serve_checkpoint

    settings = ServeSettings(
        host=host, port=port, name=name, api_key=api_key, record=record, max_running=max_running,
        max_waiting=max_waiting, context=context, dtype=dtype, device=device, seed=seed,
        shutdown_seconds=shutdown_seconds,
    )  # fmt: skip
    serve_checkpoint(checkpoint, settings, lambda line: out.print(line, highlight=False))


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint or run directory")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="New directory")],
) -> None:
    """Write an ordinary Hugging Face directory, checked by logits against plain transformers."""
    from temper.commands.checkpoints import export as export_checkpoint

    gap = export_checkpoint(checkpoint, target)
    out.print(f"{target}: logits equal to those of plain transformers within {gap:.2g}")
