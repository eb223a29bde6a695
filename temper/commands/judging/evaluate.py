"""`temper eval CHECKPOINT --suite NAME`: a checkpoint on a suite, with every metric, its interval and its budget.

Owns: wiring model, engine, verifier and suite; the budget; where the result goes; what is printed. Refuses: training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from temper import calls
from temper.build import Environments, pick_device
from temper.build.policy import Room, describe_policy, open_engine
from temper.build.thinking import read_thinking, with_budget
from temper.catalogue import reward_of
from temper.commands.find import find_model
from temper.commands.progress import show_work
from temper.errors import UserError
from temper.evals.attempts import Attempts, constant_score, play
from temper.evals.scores import ROUNDING, suite_metrics
from temper.evals.suites import DecodingConfig, Suite, answer_of, load_suite, prompts_sha256, read_tasks
from temper.folders.integrity import sha256_of
from temper.models.decoder import WALKED_FAMILIES
from temper.plugins import load_function
from temper.rewards.composite import CompositeReward
from temper.rollout.episode import EpisodeSetup
from temper.rollout.openings import try_openings
from temper.rollout.thinking import Thinking
from temper.runs.results import PromptResult, SuiteResult, differing_budget, load, save
from temper.tasks.render import Renderer
from temper.terminal import print_line
from temper.types import SamplingParams, Scalar, Task
from temper.version import __version__

MAX_RUNNING = {"cpu": 16, "cuda": 256}
"""Sequences decoded together."""
PACKAGES = {"math": "math-verify", "reasoning_gym": "reasoning-gym", "verifiers": "verifiers"}
"""Whose version changes what a verifier says."""
COUNTS = ("tokens", "turns", "tool_calls", "tool_errors", "timeouts", "denied", "side_effects", "cost_per_success")
"""Metrics that are numbers, not shares."""


@dataclass(frozen=True, kw_only=True)
class SuiteRequest:
    """The command line. None: as the suite says."""

    suite: str
    """A name, or the path of a .toml file."""
    data: Path | None = None
    samples: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_new_tokens: int | None = None
    thinking_budget: int | None = None
    """Tokens after which thinking is closed."""
    limit: int = 0
    """Only the first tasks; 0: all."""
    seed: int = 0
    out: Path | None = None
    force: bool = False
    """Replace a result with another budget."""
    numerics: Literal["exact", "fast"] = "exact"
    """exact: a sample does not depend, to the bit, on what else is drawn. fast: about twice as fast on a CPU."""
    overrides: Sequence[str] = ()
    """"key=value" over the suite's keys."""


Note = Callable[[str], None]


def evaluate_suite(
    checkpoint: Path, asked: SuiteRequest, *, note: Note = print_line, is_live: bool = True
) -> SuiteResult:
    """Evaluates and saves. Raises UserError, before anything is drawn, when the file holds another budget's result."""
    folder = find_model(checkpoint)
    suite, tasks = open_suite(asked)
    budget = budget_of(suite, tasks, asked.seed)
    path = asked.out or default_path(checkpoint, suite.name)
    require_same_budget(path, budget, force=asked.force)
    if suite.is_sample:
        note(
            f"{suite.name}: {len(tasks)} problems of the sample that ships with Temper, of its own making. The "
            f"published set is {suite.source}: give its file with --data"
        )
    constant, prompts = calls.run(_evaluate(suite, tasks, asked, folder, note, is_live))
    result = SuiteResult(
        suite=suite.name,
        checkpoint=str(checkpoint),
        weights_sha256=weights_sha256(folder),
        created=time.time(),
        budget=budget,
        constant_score=constant,
        metrics=suite_metrics(prompts, correct_at=suite.correct_at, seed=asked.seed),
        prompts=prompts,
    )
    save(result, path)
    note(f"saved: {path}")
    return result


def open_suite(asked: SuiteRequest) -> tuple[Suite, tuple[Task, ...]]:
    """The suite as the command line wants it, and its tasks."""
    suite = with_decoding(load_suite(asked.suite, data=asked.data, overrides=asked.overrides), asked)
    return suite, read_tasks(suite, limit=asked.limit)


def with_decoding(suite: Suite, asked: SuiteRequest) -> Suite:
    """The suite, asked as the command line says."""
    names = ("samples", "temperature", "top_p", "max_new_tokens")
    given = {name: value for name in names if (value := getattr(asked, name)) is not None}
    if given.get("temperature") == 0:
        given.setdefault("samples", 1)
    try:
        if asked.thinking_budget is not None:
            given["thinking"] = with_budget(suite.decoding.thinking, asked.thinking_budget).model_dump()
        decoding = DecodingConfig.model_validate({**suite.decoding.model_dump(), **given})
    except ValidationError as error:
        problems = [str(problem["msg"]).removeprefix("Value error, ") for problem in error.errors()]
        raise UserError("; ".join(problems)) from error
    return suite.model_copy(update={"decoding": decoding})


def default_path(checkpoint: Path, suite: str) -> Path:
    """Inside a run, where its dashboard finds it; else beside the work, by name."""
    is_run = (checkpoint / "run.db").is_file()
    return (checkpoint / "evaluations" if is_run else Path("evaluations") / checkpoint.resolve().name) / f"{suite}.json"


def budget_of(suite: Suite, tasks: Sequence[Task], seed: int) -> dict[str, Scalar]:
    """Everything that must be equal before two scores may be compared."""
    decoding = suite.decoding.model_dump(exclude={"stop", "thinking"})
    thinking = {} if suite.decoding.thinking is None else suite.decoding.thinking.model_dump()
    rewards = [part.model_dump(exclude_defaults=True) for part in suite.reward]
    return {
        "suite": suite.name,
        "num_prompts": len(tasks),
        "prompts_sha256": prompts_sha256(suite, tasks),
        **decoding,
        "stop": json.dumps(suite.decoding.stop),
        **{f"thinking_{name}": value for name, value in thinking.items()},
        "seed": seed,
        "verifier": json.dumps(rewards, sort_keys=True),
        "verifier_version": verifier_version(suite),
        "correct_at": suite.correct_at,
    }


def verifier_version(suite: Suite) -> str:
    """Temper's version, that of packages which judge, and the hash of files with functions of the user's own."""
    versions = [f"temper {__version__}"]
    for kind in dict.fromkeys(part.kind for part in suite.reward):
        if kind in PACKAGES:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions.append(f"{PACKAGES[kind]} {importlib.metadata.version(PACKAGES[kind])}")
        if ":" in kind:
            code = load_function(kind, where=f'reward "{kind}"').__code__
            versions.append(f"{kind} {hashlib.sha256(Path(code.co_filename).read_bytes()).hexdigest()[:12]}")
    return ", ".join(versions)


def require_same_budget(path: Path, budget: dict[str, Scalar], *, force: bool) -> None:
    """A file is for one budget: a chart over its history must not mix questions."""
    if not path.exists() or force:
        return
    old = load(path)
    if differing := differing_budget(old, dataclasses.replace(old, budget=budget)):
        raise UserError(
            f"{path} holds a result of another budget (then and now):\n  "
            + "\n  ".join(differing)
            + "\nThe two cannot be compared. Give another --out, ask as then, or replace it with --force"
        )


async def _evaluate(
    suite: Suite, tasks: Sequence[Task], asked: SuiteRequest, folder: Path, note: Note, is_live: bool
) -> tuple[float | None, tuple[PromptResult, ...]]:
    """The score of the constant answer, and what was drawn."""
    rubric = reward_of(suite.reward)
    try:
        rubric.require_scorable(tasks)
        await rubric.start()
        setup, at_once = open_setup(suite, tasks, asked, folder, rubric, note)
        try:
            await try_openings(setup.make_env, setup.renderer, tasks, seed=asked.seed, seconds=setup.episode_seconds)
            constant = await constant_score(rubric, tasks, suite.say)
            attempts = Attempts(
                name=f"suite/{suite.name}",
                samples=suite.decoding.samples,
                at_once=at_once,
                answer_of=answer_of(suite),
            )
            total = len(tasks) * attempts.samples
            with show_work(suite.name, total=total, sampler=setup.sampler, is_live=is_live) as work:
                return constant, await play(setup, tasks, attempts, progress=work.advance)
        finally:
            await setup.sampler.close()
    finally:
        await rubric.close()


def open_setup(
    suite: Suite, tasks: Sequence[Task], asked: SuiteRequest, folder: Path, rubric: CompositeReward, note: Note
) -> tuple[EpisodeSetup, int]:
    """The episodes of a suite, and how many run together."""
    policy, decoding = describe_policy(folder, suite.prompt.chat_options), suite.decoding
    shape, renderer = policy.shape, policy.make_renderer(suite.prompt.system, suite.prompt.template)
    # Environments open with words of their own; a prompt that is too long for those shows when it is played.
    asks = [task for task in tasks if task.messages]
    sizes = {task.id: len(renderer.prompt_ids(renderer.prompt_messages(task))) for task in asks}
    longest = max(sizes.values(), default=0)
    if longest + decoding.max_new_tokens > shape.max_context:
        left = shape.max_context - longest
        raise UserError(
            f"the prompt of {max(sizes, key=lambda name: sizes[name])}, the longest, has {longest} tokens; with "
            f"max_new_tokens={decoding.max_new_tokens} that is more than the model's context of {shape.max_context}. "
            f"Use {f'--max-new-tokens {left}' if left > 0 else 'shorter prompts, or a model with a longer context'}"
        )
    thinking = _thinking(decoding, renderer)
    numerics = asked.numerics
    if numerics == "exact" and shape.family not in WALKED_FAMILIES:
        note(f"numerics: fast, because exact ones are made for {', '.join(WALKED_FAMILIES)}; the last digits may vary")
        numerics = "fast"
    at_once = min(MAX_RUNNING[pick_device("auto").type], len(tasks) * decoding.samples)
    length = shape.max_context if decoding.max_turns > 1 else longest + decoding.max_new_tokens
    decode = renderer.decode if decoding.stop else None
    room = Room(seed=asked.seed, max_running=at_once, usual_length=length)
    with show_work(f"loading {folder}"):
        engine = open_engine(policy, room, numerics=numerics, decode=decode)
    setup = EpisodeSetup(
        sampler=engine,
        renderer=renderer,
        scorer=rubric,
        make_env=Environments(suite.env),
        params=_params(decoding, renderer),
        max_turns=decoding.max_turns,
        episode_seconds=decoding.episode_seconds,
        thinking=thinking,
        seed=asked.seed,
    )
    return setup, at_once


def _thinking(decoding: DecodingConfig, renderer: Renderer) -> Thinking | None:
    """When the thinking of a turn is closed, in tokens of this model."""
    if decoding.thinking is None:
        return None
    longest, key = decoding.max_new_tokens, "decoding.max_new_tokens"
    where = "decoding.thinking (--thinking-budget)"
    return read_thinking(decoding.thinking, renderer, longest=longest, key=key, stop=decoding.stop, where=where)


def _params(decoding: DecodingConfig, renderer: Renderer) -> SamplingParams:
    return SamplingParams(
        temperature=decoding.temperature,
        max_new_tokens=decoding.max_new_tokens,
        stop_ids=renderer.stop_ids,
        top_k=decoding.top_k,
        top_p=decoding.top_p,
        min_p=decoding.min_p,
        stop=tuple(decoding.stop),
    )


def weights_sha256(folder: Path) -> str:
    """Of all weight files: which model this was, whatever its directory is called."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    parts = [[file.name, sha256_of(file)] for file in files]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def render(result: SuiteResult) -> RenderableType:
    """What the terminal shows: metrics with intervals, the constant answer beside them, failures, the budget."""
    table = Table("metric", "score", "95% interval", "prompts", title=f"{result.suite}: {result.checkpoint}")
    for name, metric in result.metrics.items():
        low, high = _number(name, metric["low"]), _number(name, metric["high"])
        table.add_row(name, _number(name, metric["score"]), f"{low} to {high}", f"{metric['prompts']:g}")
    if result.constant_score is not None:
        table.add_row("commonest answer", _number("", result.constant_score), "", str(len(result.prompts)))
    samples = [sample for prompt in result.prompts for sample in prompt.samples]
    reasons = Counter(sample.reason for sample in samples if sample.reason is not None)
    lines = [f"unscorable, {count} of {len(samples)}: {reason:.200}" for reason, count in reasons.most_common(3)]
    facts = ", ".join(f"{name} {_short(value)}" for name, value in result.budget.items())
    lines += [f"budget: {facts}", f"weights: sha256 {result.weights_sha256[:16]}"]
    return Group(table, Text("\n".join(lines)))


def _number(name: str, value: float) -> str:
    is_share = name not in COUNTS and -ROUNDING <= value <= 1 + ROUNDING
    return f"{value:.1%}" if is_share else f"{value:.4g}"


def _short(value: Scalar) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text[:16] if len(text) == 64 else text
