"""`temper best CHECKPOINT PROMPTS --reward KIND --n 8`: N answers to each prompt, and the one that a reward likes most.

Owns: what prompts and rewards a user may give, where the answers go, what is printed. Refuses: training on them, which
is a rejection stage.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from temper import calls
from temper.catalogue import reward_of
from temper.commands.find import find_model
from temper.commands.judging.evaluate import Note, SuiteRequest, open_setup, with_decoding
from temper.commands.progress import show_work
from temper.config.sources import RewardConfig
from temper.errors import UserError
from temper.evals.attempts import Attempts, play
from temper.evals.best_of import BestOfGain, Pick, gains, pick
from temper.evals.suites import Suite, SuiteSource, answer_of, load_suite, read_tasks
from temper.runs.results import PromptResult
from temper.tasks.dataset import read_file
from temper.terminal import print_line
from temper.types import Message, Scalar, Task

SHOWN = 5
"""Answers in the terminal; the file has all."""
FILES = (".jsonl", ".ndjson", ".json", ".parquet", ".pq")


@dataclass(frozen=True, kw_only=True)
class BestRequest:
    """What is asked, and by what the answers are chosen."""

    prompts: tuple[str, ...] = ()
    """Texts, or files of tasks; empty: those of the suite."""
    reward: str = ""
    """A kind of reward; empty: the suite's."""
    options: Mapping[str, Scalar | list[Scalar]] = field(default_factory=dict)
    """Of the reward."""
    n: int = 8
    prompt_field: str = "prompt"
    answer_field: str = ""
    """Column with gold answers, for rewards that need them; empty: there are none."""


@dataclass(frozen=True, kw_only=True)
class BestOf:
    """The answer to every prompt, and what choosing was worth."""

    picks: tuple[Pick, ...]
    gains: tuple[BestOfGain, ...]


def best(
    checkpoint: Path, asked: SuiteRequest, wanted: BestRequest, *, out: Path | None = None, note: Note = print_line
) -> BestOf:
    """Draws, scores, picks; writes one line per prompt to `out`. Raises UserError when a prompt cannot be scored."""
    folder = find_model(checkpoint)
    suite, tasks = open_questions(asked, wanted)
    prompts = calls.run(_draw(suite, tasks, asked, folder, note))
    found = BestOf(picks=tuple(map(pick, prompts)), gains=tuple(gains(prompts)))
    if out is not None:
        write_picks(found.picks, out)
        note(f"saved: {out}")
    return found


def open_questions(asked: SuiteRequest, wanted: BestRequest) -> tuple[Suite, tuple[Task, ...]]:
    """The suite that says how to ask and to judge, with n samples each, and the tasks."""
    if asked.suite:
        suite = load_suite(asked.suite, data=asked.data, overrides=asked.overrides)
    elif wanted.prompts and wanted.reward:
        # Of a suite without a file only the way to ask and to judge is used.
        suite = Suite(name="prompts", data=SuiteSource(path="prompts"), reward=[RewardConfig(kind=wanted.reward)])
        asked = dataclasses.replace(asked, temperature=1.0 if asked.temperature is None else asked.temperature)
    else:
        raise UserError(
            "best-of-N needs prompts and a reward to choose by. Give texts or a file and --reward, e.g. "
            'temper best CHECKPOINT "Say hello" --reward length, or --suite gsm8k for both'
        )
    if wanted.reward:
        suite = suite.model_copy(update={"reward": [RewardConfig(kind=wanted.reward, options=dict(wanted.options))]})
    elif wanted.options:
        raise UserError("--options are those of --reward, and none is given")
    suite = with_decoding(suite, dataclasses.replace(asked, samples=wanted.n))
    if not wanted.prompts:
        return suite, read_tasks(suite, limit=asked.limit)
    tasks = tuple(task for place, text in enumerate(wanted.prompts, 1) for task in _tasks(text, place, wanted))
    return suite, tasks[: asked.limit or len(tasks)]


def _tasks(text: str, place: int, wanted: BestRequest) -> tuple[Task, ...]:
    if text.endswith(FILES):
        return read_file(Path(text).expanduser(), wanted.prompt_field, wanted.answer_field).tasks
    if not text.strip():
        raise UserError(f"prompt {place} is empty. Give a text, or a file of tasks ({', '.join(FILES)})")
    return (Task(id=f"prompt:{place}", messages=(Message(role="user", content=text),)),)


async def _draw(
    suite: Suite, tasks: Sequence[Task], asked: SuiteRequest, folder: Path, note: Note
) -> tuple[PromptResult, ...]:
    rubric = reward_of(suite.reward)
    try:
        rubric.require_scorable(tasks, advice="With a file, --answer-field names the column of gold answers.")
        await rubric.start()
        setup, at_once = open_setup(suite, tasks, asked, folder, rubric, note)
        try:
            attempts = Attempts(
                name="best", samples=suite.decoding.samples, at_once=at_once, answer_of=answer_of(suite)
            )
            total = len(tasks) * attempts.samples
            with show_work(f"best of {attempts.samples}", total=total, sampler=setup.sampler) as work:
                return await play(setup, tasks, attempts, progress=work.advance)
        finally:
            await setup.sampler.close()
    finally:
        await rubric.close()


def write_picks(picks: Sequence[Pick], path: Path) -> None:
    """One JSON object per prompt, in order: prompt, completion, score and all scores. null where nothing was scored."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(_line(found), ensure_ascii=False, allow_nan=False) + "\n" for found in picks)
    path.write_bytes("".join(lines).encode("utf-8", "replace"))


def _line(found: Pick) -> dict[str, Any]:
    table = dataclasses.asdict(found)
    return {"prompt": table.pop("prompt"), "completion": table.pop("text"), **table}


def render(found: BestOf) -> RenderableType:
    """What the terminal shows: the first answers, then what N buys and how far it leads from the sampler."""
    said = []
    for choice in found.picks[:SHOWN]:
        verdict = f"unscorable: {choice.reason}" if choice.score is None else f"score {choice.score:.4g}"
        said.append(f"{choice.prompt}\n  -> {choice.text or ''}\n  {verdict}, of {len(choice.scores)}\n")
    if len(found.picks) > SHOWN:
        said.append(f"... and {len(found.picks) - SHOWN} more\n")
    table = Table("best of", "expected score", "95% interval", "tokens", "KL at most", "prompts")
    for gain in found.gains:
        interval = f"{gain.low:.4g} to {gain.high:.4g}" if math.isfinite(gain.high) else ""
        cost = (f"{gain.tokens:,.1f}", f"{gain.kl_bound:.4f} nats", str(gain.num_prompts))
        table.add_row(str(gain.n), f"{gain.score:.4g}", interval, *cost)
    return Group(Text("\n".join(said)), table)
