"""How good a checkpoint is, and whether a verifier can be trusted.

Heavy imports happen inside the verbs, so --help is instant.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from temper.cli.console import Overrides, app, note, out
from temper.terminal import SafeConsole


@app.command("eval")
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint or run directory")],
    recipe: Annotated[Path | None, typer.Argument(help="Recipe with the held-out set; default: the run's own")] = None,
    suite: Annotated[str, typer.Option(help="gsm8k, math500, ... or your own .toml; default: the recipe")] = "",
    data: Annotated[Path | None, typer.Option(help="File with the suite's rows; default: a small sample")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Per prompt; default: as the suite says")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw among the tokens that hold this probability")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Of one turn")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Only the first prompts; 0: all")] = 0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    target: Annotated[Path | None, typer.Option("--out", help="Result; default evaluations/...")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a result of another budget")] = False,
    fast: Annotated[bool, typer.Option("--fast", help="Last digits then depend on what is batched")] = False,
    set_: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable")] = False,
) -> None:
    """Score of a checkpoint with 95% intervals: on a suite, or on the held-out set of a recipe."""
    if suite:
        from temper.commands.judging.evaluate import Asked, evaluate_suite, render

        asked = Asked(
            suite=suite, data=data, samples=samples, temperature=temperature, top_p=top_p,
            max_new_tokens=max_new_tokens, limit=limit, seed=seed, out=target, force=force,
            numerics="fast" if fast else "exact", overrides=set_ or (),
        )  # fmt: skip
        notes = SafeConsole(stderr=True, soft_wrap=True)
        found = evaluate_suite(checkpoint, asked, note=lambda line: notes.print(line, highlight=False))
        out.print_json(json.dumps(found.metrics)) if as_json else out.print(render(found))
        return
    _evaluate_heldout(checkpoint, recipe or checkpoint / "config.toml", set_ or (), as_json)


def _evaluate_heldout(checkpoint: Path, recipe: Path, overrides: Sequence[str], as_json: bool) -> None:
    import dataclasses

    from temper.commands.checkpoints import evaluate_checkpoint

    results = evaluate_checkpoint(checkpoint, recipe, overrides=overrides)
    if as_json:
        out.print_json(json.dumps([dataclasses.asdict(result) for result in results]))
        return
    table = Table("held out", "score", "95% interval", "prompts", "samples each", "commonest answer")
    for result in results:
        interval = f"{result.low:.1%} to {result.high:.1%}"
        counts = (str(result.num_prompts), str(result.samples_per_prompt))
        table.add_row(result.name, f"{result.score:.1%}", interval, *counts, f"{result.constant_score:.1%}")
    out.print(table)


Suite = Annotated[str, typer.Option(help="Name of a suite, or your own .toml file")]
Data = Annotated[Path | None, typer.Option(help="The suite's published file; default: the shipped sample")]
Limit = Annotated[int, typer.Option(min=0, help="Only the first prompts; 0: all")]
Fast = Annotated[bool, typer.Option("--fast", help="Faster; the last digits depend on what is batched")]


@app.command()
def compare(
    base: Annotated[Path, typer.Argument(help="A result of temper eval --suite, or a checkpoint or run directory")],
    trained: Annotated[Path, typer.Argument(help="The same, after training")],
    suite: Suite = "",
    data: Data = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Of each prompt; default 64")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0)] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    limit: Limit = 0,
    seed: int = 0,
    fast: Fast = False,
    target: Annotated[Path, typer.Option("--out", help="Directory of the page, the picture and the numbers")] = Path(
        "comparison"
    ),
    set_: Overrides = None,
) -> None:
    """What training did: paired differences with intervals, pass@k curves, a verdict; one HTML page."""
    from temper.commands.judging.compare import compare_models, render
    from temper.commands.judging.evaluate import Asked

    asked = Asked(
        suite=suite, data=data, samples=samples, temperature=temperature, max_new_tokens=max_new_tokens, limit=limit,
        seed=seed, numerics="fast" if fast else "exact", overrides=set_ or (),
    )  # fmt: skip
    out.print(render(compare_models(base, trained, asked, out=target, note=note)))


@app.command()
def scale(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint or run directory")],
    suite: Suite,
    modes: Annotated[str, typer.Option(help="best_of, majority, budget, refine")] = "best_of,majority,budget,refine",
    data: Data = None,
    samples: Annotated[int, typer.Option(min=1, help="Of best_of and majority, per prompt")] = 8,
    budgets: Annotated[str, typer.Option(help="Thinking tokens, e.g. 64,32-256; default: from the limit")] = "",
    rounds: Annotated[int, typer.Option(min=0, help="Of refinement")] = 3,
    continuation: Annotated[str, typer.Option(help="In the place of an end that comes too early")] = "\nWait",
    answer_prefix: Annotated[str, typer.Option(help="Behind thoughts that are cut")] = "\n\nFinal answer:",
    think_end: Annotated[str, typer.Option(help='The model\'s mark of the end of thought, e.g. "</think>"')] = "",
    limit: Limit = 0,
    seed: int = 0,
    fast: Fast = False,
    target: Annotated[Path, typer.Option("--out", help="Directory of the curves and the numbers")] = Path("scaling"),
    set_: Overrides = None,
) -> None:
    """Test-time scaling: accuracy against tokens for best-of-N, majority, budget forcing and refinement."""
    from temper.commands.judging.evaluate import Asked
    from temper.commands.judging.scale import Ways, parse_budgets, render
    from temper.commands.judging.scale import scale as run_modes
    from temper.evals.scaling import Budget

    shape = Budget(max_tokens=1, continuation=continuation, answer_prefix=answer_prefix, think_end=think_end)
    ways = Ways(
        modes=tuple(filter(None, (mode.strip() for mode in modes.split(",")))),
        samples=samples,
        shape=shape,
        budgets=parse_budgets(budgets, shape),
        rounds=rounds,
    )
    numerics: Literal["exact", "fast"] = "fast" if fast else "exact"
    asked = Asked(suite=suite, data=data, limit=limit, seed=seed, numerics=numerics, overrides=set_ or ())
    out.print(render(run_modes(checkpoint, asked, ways, out=target, note=note)))


@app.command()
def best(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint or run directory")],
    prompts: Annotated[list[str] | None, typer.Argument(help="Texts, or files of tasks; default: the suite's")] = None,
    suite: Suite = "",
    data: Data = None,
    reward: Annotated[str, typer.Option(help="Kind of reward to choose by; default: the suite's")] = "",
    options: Annotated[str, typer.Option(help="Options of the reward, as JSON")] = "{}",
    n: Annotated[int, typer.Option("--n", min=1, help="Answers to choose among")] = 8,
    answer_field: Annotated[str, typer.Option(help="Column of a file with gold answers; default: none")] = "",
    temperature: Annotated[float | None, typer.Option(min=0.0)] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    limit: Limit = 0,
    seed: int = 0,
    fast: Fast = False,
    target: Annotated[Path | None, typer.Option("--out", help="File for all answers, one JSON object a line")] = None,
    set_: Overrides = None,
) -> None:
    """Best-of-N: draws N answers to each prompt and gives the one that a reward likes most."""
    from temper.commands.judging import verify as rewards
    from temper.commands.judging.best import Wanted, render
    from temper.commands.judging.best import best as draw
    from temper.commands.judging.evaluate import Asked

    asked = Asked(
        suite=suite, data=data, temperature=temperature, max_new_tokens=max_new_tokens, limit=limit, seed=seed,
        numerics="fast" if fast else "exact", overrides=set_ or (),
    )  # fmt: skip
    wanted = Wanted(
        prompts=tuple(prompts or ()), reward=reward, options=rewards.read_options(options), n=n,
        answer_field=answer_field,
    )  # fmt: skip
    out.print(render(draw(checkpoint, asked, wanted, out=target, note=note)))


@app.command("label-steps")
def label_steps(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint or run directory, which continues the solutions")],
    target: Annotated[Path, typer.Option("--out", help="A .jsonl file that a reward_model stage reads")],
    suite: Suite = "",
    data: Data = None,
    continuations: Annotated[int, typer.Option(min=1, help="From the end of every step")] = 8,
    min_share: Annotated[float, typer.Option(help="Successes from which on a step is good; 0: one is enough")] = 0.0,
    separator: Annotated[str, typer.Option(help="Between two steps")] = "\n\n",
    samples: Annotated[int | None, typer.Option(min=1, help="Solutions of a task that brings none")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    limit: Limit = 0,
    seed: int = 0,
    fast: Fast = False,
) -> None:
    """Labels the steps of solutions by how often the model succeeds from there: data for a process reward model."""
    from temper.commands.judging.evaluate import Asked
    from temper.commands.judging.label_steps import label_steps as label
    from temper.stages.step_labels import Labelling

    asked = Asked(
        suite=suite, data=data, samples=samples, max_new_tokens=max_new_tokens, limit=limit, seed=seed,
        numerics="fast" if fast else "exact",
    )  # fmt: skip
    label(
        checkpoint,
        asked,
        Labelling(separator=separator, samples=continuations, min_share=min_share),
        out=target,
        note=note,
    )


@app.command()
def choose(
    candidates: Annotated[list[Path], typer.Argument(help="Runs (all their checkpoints) or checkpoint directories")],
    suite: Annotated[list[str], typer.Option(help="Probe set of a domain; give one --suite for each")],
    k: Annotated[int, typer.Option("--k", min=1, help="Choose by pass@k")] = 8,
    average: Annotated[Path | None, typer.Option(help="Directory for the average of the chosen ones")] = None,
    stage: Annotated[str, typer.Option(help="Of a run, only checkpoints of this stage, e.g. sft")] = "",
    samples: Annotated[int | None, typer.Option(min=1, help="Of each prompt; default: k")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0)] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    limit: Limit = 0,
    seed: int = 0,
    fast: Fast = False,
    target: Annotated[Path, typer.Option("--out", help="Directory of the results")] = Path("choice"),
) -> None:
    """Which checkpoint RL should start from: the best of each domain by pass@k, and their average."""
    from temper.commands.judging.choose import choose as rate
    from temper.commands.judging.choose import render
    from temper.commands.judging.evaluate import Asked

    probes = [
        Asked(
            suite=name, samples=samples, temperature=temperature, max_new_tokens=max_new_tokens, limit=limit,
            seed=seed, numerics="fast" if fast else "exact",
        )
        for name in suite
    ]  # fmt: skip
    out.print(render(rate(candidates, probes, k=k, out=target, average=average, stage=stage, note=note)))


@app.command()
def verify(
    kind: Annotated[str, typer.Argument(help="A kind of reward: math, code, format ...")],
    golden: Annotated[Path | None, typer.Option(help="Your own golden set; default: the shipped one")] = None,
    attack: Annotated[bool, typer.Option("--attack", help="Run the attack pack: none may score")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="math: beside math-verify and equal strings")] = False,
    options: Annotated[str, typer.Option(help="Options of the reward, as JSON")] = "{}",
) -> None:
    """How often a verifier is wrong on a golden set, with intervals; or whether attacks score."""
    from temper.commands.judging import verify as command

    result = command.verify(kind, golden=golden, attack=attack, options=command.read_options(options))
    out.print(command.render(result))
    if compare:
        out.print(command.compare(result))
    if not result.is_fine:
        raise typer.Exit(1)
