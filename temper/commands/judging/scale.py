"""`temper scale CHECKPOINT --suite NAME`: accuracy against tokens for ways to spend more of them on an answer.

Owns: which modes there are, opening the model for the longest of them, where the files go. Refuses: environments of
several turns, for which none of the modes is defined.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from temper import calls
from temper.build.policy import describe_policy
from temper.catalogue import reward_of
from temper.commands.find import find_model
from temper.commands.judging.evaluate import Note, SuiteRequest, budget_of, open_setup, with_decoding
from temper.commands.progress import show_work
from temper.errors import UserError, did_you_mean
from temper.evals.comparison.curves import CurvePoint, best_of, majority, panel, single
from temper.evals.comparison.page import write_png
from temper.evals.scaling import CHECK, ScalingAttempt, ScalingSetup, ThinkingBudget, draw_samples, force_budget, refine
from temper.evals.suites import Suite, answer_of, load_suite, read_tasks
from temper.rewards.composite import CompositeReward
from temper.runs.report.plot import chart
from temper.tasks.render import Renderer
from temper.terminal import print_line
from temper.types import Task


@dataclass(frozen=True, kw_only=True)
class Ways:
    """Which modes, and how far each is turned up."""

    modes: tuple[str, ...]
    samples: int = 8
    """Of best-of-N and majority: N goes up to it. Other modes answer as often as the suite's samples."""
    budgets: tuple[ThinkingBudget, ...] = ()
    """Empty: made from the suite's token limit."""
    shape: ThinkingBudget = field(default_factory=lambda: ThinkingBudget(max_tokens=1))
    """Words and marks of budgets that are made."""
    rounds: int = 3
    """Of refinement, after the first answer."""
    request: str = CHECK
    """What is said between them."""

    def __post_init__(self) -> None:
        if not self.modes:
            raise UserError(f"no mode is given. Known: {', '.join(MODES)}")
        for mode in self.modes:
            if mode not in MODES:
                raise UserError(f'mode "{mode}" is unknown.{did_you_mean(mode, MODES)} Known: {", ".join(MODES)}')


@dataclass(frozen=True, kw_only=True)
class ScalingWork:
    """What a mode works with."""

    setup: ScalingSetup
    tasks: Sequence[Task]
    ways: Ways
    repeats: int
    """Answers per prompt of modes whose cost does not lie in their number."""
    samples: list[list[ScalingAttempt]]
    """Drawn once, for all modes that choose among them."""


async def _best_of(work: ScalingWork) -> list[CurvePoint]:
    return [*best_of(work.samples, by="reward"), *best_of(work.samples, by="logprob")]


async def _majority(work: ScalingWork) -> list[CurvePoint]:
    if all(attempt.answer is None for members in work.samples for attempt in members):
        raise UserError("mode majority: no answer could be read, or the suite does not say how (its key answer)")
    return majority(work.samples)


async def _budget(work: ScalingWork) -> list[CurvePoint]:
    points = []
    for budget in work.ways.budgets:
        attempts = await force_budget(work.setup, work.tasks, work.repeats, budget)
        points.append(single("budget", f"{budget.min_tokens} to {budget.max_tokens} tokens", attempts))
    return points


async def _refine(work: ScalingWork) -> list[CurvePoint]:
    rounds = await refine(work.setup, work.tasks, work.repeats, work.ways.rounds, work.ways.request)
    return [single("refine", f"round {number}", attempts) for number, attempts in enumerate(rounds)]


MODES: dict[str, Callable[[ScalingWork], Awaitable[list[CurvePoint]]]] = {
    "best_of": _best_of,
    "majority": _majority,
    "budget": _budget,
    "refine": _refine,
}
CHOOSING = ("best_of", "majority")
"""Modes that choose among independent samples."""


def scale(checkpoint: Path, asked: SuiteRequest, ways: Ways, *, out: Path, note: Note = print_line) -> list[CurvePoint]:
    """Runs the modes and writes scaling.json, scaling.svg and, where matplotlib is installed, scaling.png."""
    folder = find_model(checkpoint)
    suite = with_decoding(load_suite(asked.suite, data=asked.data, overrides=asked.overrides), asked)
    tasks = read_tasks(suite, limit=asked.limit)
    require_single_turn(suite, tasks)
    ways = dataclasses.replace(ways, budgets=ways.budgets or default_budgets(suite.decoding.max_new_tokens, ways.shape))
    points = calls.run(_run(suite, tasks, asked, ways, folder, note))
    write_scaling(points, f"{suite.name}: {checkpoint}", out, note)
    budget = budget_of(suite, tasks, asked.seed)
    table = {
        "suite": suite.name,
        "checkpoint": str(checkpoint),
        "budget": budget,
        "ways": dataclasses.asdict(ways),
        "points": [dataclasses.asdict(point) for point in points],
    }
    (out / "scaling.json").write_text(json.dumps(table, indent=1, allow_nan=False), encoding="utf-8")
    return points


def write_scaling(points: Sequence[CurvePoint], title: str, out: Path, note: Note) -> None:
    out.mkdir(parents=True, exist_ok=True)
    drawing = panel(points, title)
    (out / "scaling.svg").write_text(chart([drawing], width=640, height=380), encoding="utf-8")
    note(f"saved: {out / 'scaling.svg'}, scaling.json")
    try:
        write_png([drawing], out / "scaling.png")
    except UserError as error:
        note(f"no scaling.png: {error}")


def render(points: Sequence[CurvePoint]) -> Table:
    """What the terminal shows. Tokens are per prompt; injected ones are not among those drawn."""
    has_unscorable = any(point.num_unscorable for point in points)
    last = ("unscorable",) if has_unscorable else ()
    table = Table("mode", "setting", "accuracy", "95% interval", "tokens", "injected", *last)
    for point in points:
        table.add_row(
            point.mode,
            point.setting,
            f"{point.accuracy:.1%}",
            f"{point.low:.1%} to {point.high:.1%}",
            f"{point.tokens:,.1f}",
            f"{point.injected:,.1f}",
            *((str(point.num_unscorable),) if has_unscorable else ()),
        )
    return table


def default_budgets(max_new_tokens: int, shape: ThinkingBudget) -> tuple[ThinkingBudget, ...]:
    """Cut at a quarter, at half and at all of the limit, and kept thinking for half of it. All else as in `shape`."""
    half = max(1, max_new_tokens // 2)
    ranges = ((0, max(1, max_new_tokens // 4)), (0, half), (0, max_new_tokens), (half, max_new_tokens))
    shape = dataclasses.replace(shape, answer_tokens=min(shape.answer_tokens, max_new_tokens))
    return tuple(dataclasses.replace(shape, min_tokens=least, max_tokens=most) for least, most in ranges)


def parse_budgets(text: str, shape: ThinkingBudget) -> tuple[ThinkingBudget, ...]:
    """ "64,32-256": at most 64 thinking tokens; at least 32 and at most 256. All else as in `shape`."""
    budgets = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        least, _, most = part.rpartition("-")
        if not most.isdecimal() or not (least or "0").isdecimal():
            raise UserError(f'budget "{part}" is not a number of tokens or a range. Write e.g. --budgets 64,32-256')
        budgets.append(dataclasses.replace(shape, min_tokens=int(least or 0), max_tokens=int(most)))
    return tuple(budgets)


def require_single_turn(suite: Suite, tasks: Sequence[Task]) -> None:
    environments = {suite.env.name or task.env for task in tasks}
    if environments != {"single_turn"} or suite.decoding.max_turns > 1:
        raise UserError(
            f'suite "{suite.name}" plays in {", ".join(sorted(environments))} over up to {suite.decoding.max_turns} '
            f"turns. Test-time scaling is defined for one question and one answer: use a suite without environment"
        )
    if suite.decoding.thinking is not None:
        raise UserError(
            f'suite "{suite.name}" has decoding.thinking, and here answers are drawn in pieces that know nothing of '
            f"its budget. Leave it out; temper scale has budgets of its own, e.g. --modes budget --budgets 64,256"
        )


async def _run(
    suite: Suite, tasks: Sequence[Task], asked: SuiteRequest, ways: Ways, folder: Path, note: Note
) -> list[CurvePoint]:
    rubric = reward_of(suite.reward)
    try:
        rubric.require_scorable(tasks)
        await rubric.start()
        setup = _open(suite, tasks, asked, ways, folder, rubric, note)
        try:
            with show_work(f"{suite.name}, samples", sampler=setup.sampler) as shown:
                is_choosing = any(mode in CHOOSING for mode in ways.modes)
                samples = await draw_samples(setup, tasks, ways.samples) if is_choosing else []
                work = ScalingWork(setup=setup, tasks=tasks, ways=ways, repeats=suite.decoding.samples, samples=samples)
                points: list[CurvePoint] = []
                for mode in ways.modes:
                    shown.rename(f"{suite.name}, {mode}")
                    points += await MODES[mode](work)
                return points
        finally:
            await setup.sampler.close()
    finally:
        await rubric.close()


def _open(
    suite: Suite,
    tasks: Sequence[Task],
    asked: SuiteRequest,
    ways: Ways,
    folder: Path,
    rubric: CompositeReward,
    note: Note,
) -> ScalingSetup:
    """The suite's model with room for the longest sequence that a mode can make."""
    policy = describe_policy(folder, suite.prompt.chat_options)
    renderer = policy.make_renderer(suite.prompt.system, suite.prompt.template)
    longest = max(len(renderer.prompt_ids(renderer.prompt_messages(task))) for task in tasks)
    decoding = suite.decoding
    room = max(decoding.max_new_tokens, min(_longest_turns(ways, suite, renderer), policy.shape.max_context - longest))
    marks = [budget.think_end for budget in ways.budgets if budget.think_end]
    larger = decoding.model_copy(update={"max_new_tokens": room, "stop": [*decoding.stop, *marks]})
    episodes, at_once = open_setup(suite.model_copy(update={"decoding": larger}), tasks, asked, folder, rubric, note)
    params = dataclasses.replace(episodes.params, max_new_tokens=decoding.max_new_tokens, stop=tuple(decoding.stop))
    return ScalingSetup(
        sampler=episodes.sampler,
        renderer=renderer,
        scorer=rubric,
        params=params,
        answer_of=answer_of(suite),
        correct_at=suite.correct_at,
        prefix=f"scale/{suite.name}",
        attempt_seconds=decoding.episode_seconds,
        max_running=at_once,
    )


def _longest_turns(ways: Ways, suite: Suite, renderer: Renderer) -> int:
    """Tokens behind the prompt that the longest mode can need."""
    needed = [suite.decoding.max_new_tokens]
    if "budget" in ways.modes:
        needed += [_longest_thought(budget, renderer) for budget in ways.budgets]
    if "refine" in ways.modes:
        needed.append((ways.rounds + 1) * (suite.decoding.max_new_tokens + len(renderer.encode(ways.request)) + 32))
    return max(needed)


def _longest_thought(budget: ThinkingBudget, renderer: Renderer) -> int:
    injected = budget.max_continuations * len(renderer.encode(budget.continuation))
    return budget.max_tokens + budget.answer_tokens + injected + len(renderer.encode(budget.answer_prefix))
