"""`temper choose RUN_OR_CHECKPOINTS --suite A --suite B --k 8 --average OUT`: the checkpoint of each domain by pass@k,
and the average of the chosen ones.

Owns: which checkpoints compete, which wins, what is averaged and why. Refuses: choosing by pass@1, which is what RL
improves; what it starts from must be able to find the answer at all.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from temper.commands.find import find_model, leaves_of
from temper.commands.judging.evaluate import Note, SuiteRequest, budget_of, evaluate_suite, open_suite, weights_sha256
from temper.errors import UserError
from temper.evals.passk import pass_at_k
from temper.evals.scores import ROUNDING, Metric, share_interval
from temper.models.average import average_checkpoints
from temper.runs.results import SuiteResult, load
from temper.terminal import print_line
from temper.trainer.checkpoint import list_checkpoints


@dataclass(frozen=True, kw_only=True)
class CheckpointRating:
    """One checkpoint on the probe set of every domain."""

    checkpoint: Path
    scores: Mapping[str, Metric]
    """pass@k with its interval, by suite."""


@dataclass(frozen=True, kw_only=True)
class CheckpointChoice:
    k: int
    rated: tuple[CheckpointRating, ...]
    winners: Mapping[str, Path]
    """By suite."""
    average: CheckpointRating | None
    """None: not asked for."""


def choose(
    candidates: Sequence[Path], probes: Sequence[SuiteRequest], *, k: int, out: Path, average: Path | None = None,
    stage: str = "", note: Note = print_line,
) -> CheckpointChoice:  # fmt: skip
    """Evaluates every candidate on every probe set, names the winners, averages them. Results go to `out`, and those
    that are there already, of the same weights and budget, are not drawn again.

    probes: one per domain. stage: of a run, only checkpoints of this kind of stage.
    """
    checkpoints = find_candidates(candidates, stage=stage)
    names = [open_suite(asked)[0].name for asked in probes]
    if not names or len(set(names)) != len(names):
        raise UserError("give one suite per domain, each with a name of its own: --suite gsm8k --suite mbpp")
    if average is not None and average.exists() and (average.is_file() or any(average.iterdir())):
        raise UserError(f"{average} is not empty. Give a new directory")
    asks = [dataclasses.replace(asked, samples=_samples(asked, k)) for asked in probes]
    rated = tuple(
        CheckpointRating(
            checkpoint=checkpoint,
            scores={
                name: _rate(checkpoint, asked, k, out / f"{name}-{place}.json", note)
                for name, asked in zip(names, asks, strict=True)
            },
        )
        for place, checkpoint in enumerate(checkpoints)
    )
    winners = {name: winner(rated, name) for name in names}
    made = None
    if average is not None:
        average_checkpoints([winners[name] for name in names], average, facts=_facts(rated, winners, k))
        note(f"saved: {average}")
        made = CheckpointRating(
            checkpoint=average,
            scores={
                name: _rate(average, asked, k, out / f"{name}-average.json", note)
                for name, asked in zip(names, asks, strict=True)
            },
        )
    chosen = CheckpointChoice(k=k, rated=rated, winners=winners, average=made)
    (out / "choice.json").write_text(json.dumps(as_table(chosen), indent=1, allow_nan=False), encoding="utf-8")
    return chosen


def find_candidates(paths: Sequence[Path], *, stage: str = "") -> list[Path]:
    """Checkpoint directories as they are, runs as all their finished checkpoints, in the order of training."""
    found: list[Path] = []
    for path in paths:
        if not (path / "run.db").is_file():
            found.append(find_model(path))
            continue
        folders = sorted((path / "checkpoints").glob("*-*"), key=lambda folder: int(folder.name.partition("-")[0]))
        kinds = {folder: folder.name.partition("-")[2] for folder in folders}
        wanted = [f for f in folders if (kinds[f] == stage if stage else leaves_of(f) == "policy")]
        own = [checkpoint for folder in wanted for checkpoint in list_checkpoints(folder)]
        if not own:
            raise UserError(
                f"{path} has no checkpoint{f' of a stage {stage}' if stage else ''}. Its stages: "
                f"{', '.join(kinds.values()) or 'none yet'}"
            )
        found += own
    unique = list(dict.fromkeys(found))
    if not unique:
        raise UserError("give at least one run or checkpoint to choose from")
    return unique


def winner(rated: Sequence[CheckpointRating], suite: str) -> Path:
    """The highest pass@k; of equal ones the first, which has trained least."""
    return max(rated, key=lambda each: each.scores[suite]["score"]).checkpoint


def pass_at(result: SuiteResult, k: int) -> Metric:
    """pass@k over prompts with at least k scored samples."""
    correct_at = float(result.budget["correct_at"]) - ROUNDING
    scored = [[s.score for s in prompt.samples if s.score is not None] for prompt in result.prompts]
    enough = [scores for scores in scored if len(scores) >= k]
    if not enough:
        raise UserError(f"{result.checkpoint} on {result.suite}: no prompt has {k} scored samples, so no pass@{k}")
    values = [pass_at_k(len(scores), sum(score >= correct_at for score in scores), k) for scores in enough]
    return share_interval(values, sum(map(len, enough)))


def _samples(asked: SuiteRequest, k: int) -> int:
    if asked.temperature == 0 and k > 1:
        raise UserError(f"pass@{k} needs different samples, and temperature 0 gives one. Use a temperature")
    if asked.samples is not None and asked.samples < k:
        raise UserError(f"--samples {asked.samples} is less than --k {k}. pass@k needs at least k samples")
    return asked.samples or k


def _rate(checkpoint: Path, asked: SuiteRequest, k: int, path: Path, note: Note) -> Metric:
    """pass@k of one checkpoint: from the file if it holds just this, else drawn now."""
    suite, tasks = open_suite(asked)
    if path.is_file():
        known = load(path)
        is_same = known.weights_sha256 == weights_sha256(find_model(checkpoint))
        if is_same and dict(known.budget) == budget_of(suite, tasks, asked.seed):
            return pass_at(known, k)
    return pass_at(evaluate_suite(checkpoint, dataclasses.replace(asked, out=path, force=True), note=note), k)


def _facts(rated: Sequence[CheckpointRating], winners: Mapping[str, Path], k: int) -> dict[str, Any]:
    """What the record of an average says about the choice."""
    scores = {each.checkpoint: each.scores for each in rated}
    return {
        "chosen_by": f"pass@{k}",
        "domains": {suite: {"path": str(path), **scores[path][suite]} for suite, path in winners.items()},
    }


def as_table(chosen: CheckpointChoice) -> dict[str, Any]:
    everyone = (*chosen.rated, *(() if chosen.average is None else (chosen.average,)))
    return {
        "k": chosen.k,
        "winners": {suite: str(path) for suite, path in chosen.winners.items()},
        "average": None if chosen.average is None else str(chosen.average.checkpoint),
        "checkpoints": [{"path": str(each.checkpoint), "scores": dict(each.scores)} for each in everyone],
    }


def render(chosen: CheckpointChoice) -> RenderableType:
    suites = list(chosen.winners)
    table = Table("checkpoint", *suites, title=f"pass@{chosen.k}, 95% interval")
    for each in chosen.rated:
        cells = [_cell(each, suite, is_best=chosen.winners[suite] == each.checkpoint) for suite in suites]
        table.add_row(str(each.checkpoint), *cells)
    if chosen.average is not None:
        average = chosen.average
        table.add_row(str(average.checkpoint), *(_cell(average, suite, is_best=False) for suite in suites))
    lines = [f"{suite}: {path}" for suite, path in chosen.winners.items()]
    return Group(table, Text("\n".join(["chosen:", *lines])))


def _cell(rated: CheckpointRating, suite: str, *, is_best: bool) -> str:
    metric = rated.scores[suite]
    return f"{metric['score']:.1%} ({metric['low']:.1%} to {metric['high']:.1%}){' *' if is_best else ''}"
