"""`temper sample`: samples from a checkpoint, or talks to it.

Heavy imports happen inside the verb, so --help is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from temper.cli.console import app, importing, out, require_checkpoint


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
    require_checkpoint(checkpoint)
    import asyncio

    from temper.commands.find import find_model
    from temper.commands.progress import show_work

    with importing():
        from temper.build.policy import Room, open_policy
    with show_work(f"loading {checkpoint}"):
        policy = open_policy(find_model(checkpoint), Room(seed=seed, max_running=min(n, 32)))

    async def talk() -> None:
        messages: list[dict[str, str]] = []
        while True:
            text = prompt if prompt is not None else input("you> ")
            messages.append({"role": "user", "content": text})
            with show_work("answering", sampler=policy.engine):
                (answers,) = await policy.answer([messages], n, temperature=temperature, max_new_tokens=max_new_tokens)
            for number, answer in enumerate(answers, start=1):
                if n > 1:  # an answer may have blank lines of its own
                    out.print(f"--- answer {number} of {n} ---", highlight=False)
                out.print(answer)
            if prompt is not None:
                return
            messages.append({"role": "assistant", "content": answers[0]})

    try:
        asyncio.run(talk())
    except (EOFError, KeyboardInterrupt):
        out.print()
