"""Random schedules of a run with drops, crashes and resumes, on a virtual clock: the real loop, source and buffer over
groups that are drawn by the simulated sampler.

Owns: drawing a schedule from a seed, living through it, and what must hold of the history that survives. Groups are not
played episode by episode: ten thousand schedules would take ten times as long, and who is drawn, dropped, trained and
drawn again is decided above them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

from temper import loop
from temper.rollout.buffer import Buffer
from temper.rollout.episode import EpisodeSetup
from temper.rollout.source import RolloutSettings, RolloutSource
from temper.simulate.clock import VirtualLoop, spend
from temper.simulate.lengths import Lengths
from temper.simulate.run import make_credit, make_plan
from temper.simulate.sampler import SamplerLimits, SimulatedSampler
from temper.simulate.speeds import Speeds
from temper.simulate.trainer import SimulatedTrainer
from temper.simulate.world import Lots, make_setup
from temper.tasks.dataset import FileSource, Stream
from temper.types import (
    Batch,
    EvaluationResult,
    Group,
    Message,
    Request,
    Score,
    Status,
    StepReport,
    Task,
    Trajectory,
    Turn,
)

MAX_ROUNDS = 1000
"""Nothing is given up here: a step ends when it is full."""
MOST_TOKENS = 20
"""Of a group's answers; the longest group takes schedule.longest_seconds for them."""
STEP_SECONDS = 1e4
"""Deadline of a step, far above what any takes: passed, something has been forgotten."""


@dataclass(frozen=True)
class Schedule:
    seed: int
    groups_per_step: int
    staleness: int
    group_size: int
    num_tasks: int
    """Of an epoch."""
    drop_share: float
    steps: int
    checkpoint_every: int
    checkpoint_seconds: float
    longest_seconds: float
    """Of a group."""
    train_seconds: float
    is_shared: bool
    crashes: tuple[float, ...]
    """Seconds that each process lives; the last one lives to the end."""
    controls: tuple[Any, ...]
    """rollout.controls, for Parts.more."""
    order: str
    """rollout.order: in another than "draw" a step may leave draws behind that are trained later."""

    @property
    def most_left_behind(self) -> int:
        """Draws that may be under way when a step ends, though later ones were trained."""
        return 0 if self.order == "draw" else (self.staleness + 1) * self.groups_per_step


def draw_schedule(
    seed: int, orders: Sequence[str] = ("draw",), controls: Sequence[tuple[Any, ...]] = ((),)
) -> Schedule:
    lot = random.Random(seed)
    staleness = lot.choice([0, 0, 1, 1, 2, 4])
    longest, train = lot.choice([0.1, 1.0, 30.0]), lot.choice([0.0, 0.5, 10.0])
    groups_per_step, steps = lot.choice([1, 1, 2, 2, 3]), lot.randint(2, 4)
    return Schedule(
        seed=seed,
        groups_per_step=groups_per_step,
        staleness=staleness,
        group_size=lot.choice([1, 1, 1, 2]),
        num_tasks=lot.randint(1, 3 * groups_per_step),
        drop_share=lot.choice([0.0, 0.0, 0.2, 0.5]),
        steps=steps,
        checkpoint_every=lot.randint(1, 3),
        checkpoint_seconds=lot.choice([0.0, 0.4]),
        longest_seconds=longest,
        train_seconds=train,
        is_shared=lot.random() < 0.5,
        crashes=tuple(lot.random() * steps * (longest + train) for _ in range(lot.choice([0, 1, 1, 2]))),
        controls=(chosen := lot.choice(controls)),
        # A synchronous step waits for all of its groups, unless a control starts more than it needs.
        order=lot.choice(orders) if staleness or chosen else "draw",
    )


@dataclass
class Step:
    """One step of the history that survives."""

    trained: list[tuple[int, str]]
    """(draw, task) of each group."""
    dropped: list[tuple[int, str]]
    ages: list[int]
    waited: float
    """Seconds that the trainer waited for it."""


@dataclass
class History:
    steps: dict[int, Step] = field(default_factory=dict)
    resumes: int = 0
    seconds: float = 0.0


MakeBuffer = Callable[..., Buffer]
MakeSource = Callable[..., RolloutSource]


@dataclass(frozen=True)
class Parts:
    """What is on trial. Others than these are planted faults, which must be found."""

    make_buffer: MakeBuffer = Buffer
    make_source: MakeSource = RolloutSource
    more: Callable[[Schedule], tuple[Any, ...]] = lambda schedule: ()
    """What a source is given beside the rest: its controls."""


def live_through(schedule: Schedule, parts: Parts = Parts()) -> History:
    """Runs to the last step, through all crashes. Raises what ends the run before that."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner, patch("temper.rollout.source.run_group", _run_group):
        return runner.run(_live(schedule, parts))


async def _live(schedule: Schedule, parts: Parts) -> History:
    history, saved = History(), Saved()
    for lifetime in (*schedule.crashes, None):
        process = _Process(schedule, parts, history, saved)
        running = asyncio.create_task(loop.run(process.plan()))
        await asyncio.wait({running}, timeout=1e3 * STEP_SECONDS if lifetime is None else lifetime)
        if running.done():
            running.result()
            break
        assert lifetime is not None, "the run stands still"
        process.die()
        running.cancel()
        await asyncio.wait({running}, timeout=1e6)
        history.resumes += 1
        saved = process.saved()
        history.steps = {step: found for step, found in history.steps.items() if step <= saved.step}
    history.seconds = asyncio.get_running_loop().time()
    return history


@dataclass(frozen=True)
class Saved:
    """A checkpoint."""

    step: int = 0
    state: Mapping[str, Any] | None = None
    when: float = 0.0
    """It is there from this second on: before, it is half a file."""


class _Process:
    """One life of the run: from a checkpoint to the end, or to a crash."""

    def __init__(self, schedule: Schedule, parts: Parts, history: History, saved: Saved) -> None:
        self._schedule, self._history, self._checkpoints = schedule, history, [saved]
        self._is_alive = True
        self._loop = asyncio.get_running_loop()
        speeds = Speeds(
            decode_step=schedule.longest_seconds / MOST_TOKENS,
            decode_row=0.0,
            train_token=0.0,
            train_step=schedule.train_seconds,
        )
        self._sampler = SimulatedSampler(speeds, _lengths_of(schedule), SamplerLimits(max_running=10_000))
        self._trainer = SimulatedTrainer(speeds, version=saved.step)
        setup = make_setup(self._sampler, _Lot(schedule), lambda task: 1, max_new_tokens=1000, episode_seconds=1e9)
        buffer = parts.make_buffer(
            groups_per_step=schedule.groups_per_step,
            max_staleness=schedule.staleness,
            max_rounds=MAX_ROUNDS,
            version=saved.step,
            **({} if schedule.order == "draw" else {"order": schedule.order}),
        )
        settings = RolloutSettings(
            group_size=schedule.group_size,
            min_members=1,
            drop_degenerate=False,
            error_limit=1.0,
            step_seconds=STEP_SECONDS,
            prefix="stage 0",
        )
        credit, more = make_credit(speeds), parts.more(schedule)
        self._source = _Timed(parts.make_source(setup, stream_of(schedule), buffer, settings, credit, *more))
        if saved.state is not None:
            self._source.load_state(saved.state)

    def plan(self) -> loop.Plan:
        schedule = self._schedule
        plan = make_plan(
            self._source,
            (self._sampler, self._trainer),
            recorders=(self,),
            steps=schedule.steps,
            runs_ahead=schedule.staleness > 0,
            is_shared=schedule.is_shared,
        )
        changes = {"first_step": self._checkpoints[0].step + 1, "checkpoint_every": schedule.checkpoint_every}
        return loop.Plan(**{**{name: getattr(plan, name) for name in plan.__dataclass_fields__}, **changes,
                            "checkpoint": self._save})  # fmt: skip

    def _save(self, step: int) -> None:
        spend(self._schedule.checkpoint_seconds)
        when = self._loop.time() + self._schedule.checkpoint_seconds
        self._checkpoints.append(Saved(step, self._source.state(), when))

    def saved(self) -> Saved:
        """The newest checkpoint that was whole when the process died."""
        now = self._loop.time()
        return [saved for saved in self._checkpoints if saved.when <= now][-1]

    def die(self) -> None:
        self._is_alive = False

    def append(self, report: StepReport, batch: Batch) -> None:
        if not self._is_alive:
            return
        assert report.step not in self._history.steps, "a step is trained once"
        version = report.version - 1
        self._history.steps[report.step] = Step(
            trained=[(group.draw, group.task.id) for group in batch.groups],
            dropped=[(group.draw, group.task.id) for group, _ in batch.dropped],
            ages=[version - group.oldest_version for group in batch.groups],
            waited=self._source.waited,
        )

    def evaluation(self, result: EvaluationResult) -> None:
        """Nothing is held out."""


class _Timed:
    """A source of batches, and how long its last take() took on the virtual clock."""

    def __init__(self, source: RolloutSource) -> None:
        self._source = source
        self.waited = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    async def take(self, step: int) -> Batch:
        started = asyncio.get_running_loop().time()
        batch = await self._source.take(step)
        self.waited = asyncio.get_running_loop().time() - started
        return batch


class _Lot(Lots):
    """Whether a group is dropped: the same in every life, as with a seeded sampler."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self._schedule = schedule

    def drops(self, draw: int) -> bool:
        share = self._schedule.drop_share
        return share > 0 and random.Random(self._schedule.seed * 1_000_003 + draw).random() < share


def _lengths_of(schedule: Schedule) -> Lengths:
    """Tokens of a group by its draw; a few are long."""

    def length(group: str, member: int) -> int:
        lot = random.Random(schedule.seed * 1_000_003 - member).random()
        return 1 + int((MOST_TOKENS - 1) * lot**3)

    return length


async def _run_group(setup: EpisodeSetup, task: Task, *, draw: int, group_size: int, **_: Any) -> Group:
    """In place of run_group: one request for all members, no environment, a reward by lot."""
    assert isinstance(setup.scorer, _Lot)
    request = Request(id=f"g/{draw}/0", prompt_ids=(1,), params=setup.params)
    turn = Turn(completion=await setup.sampler.generate(request), message=Message(role="assistant", content="."))
    score = Score.unscorable("by lot") if setup.scorer.drops(draw) else Score.of(1.0)
    members = tuple(
        Trajectory(task_id="t", group_id="g", index=index, turns=(turn,), status=Status.COMPLETED, score=score)
        for index in range(group_size)
    )
    return Group(id=f"{task.id}#{draw}", draw=draw, task=task, trajectories=members)


@cache
def _tasks(num_tasks: int) -> tuple[Task, ...]:
    return tuple(Task(id=f"t{i}", messages=(Message(role="user", content=str(i)),)) for i in range(num_tasks))


def stream_of(schedule: Schedule) -> Stream:
    return Stream([FileSource("tasks", _tasks(schedule.num_tasks))], [1.0], seed=schedule.seed)


def check(schedule: Schedule, history: History) -> None:
    """What must hold of every schedule."""
    steps = [history.steps[step] for step in range(1, schedule.steps + 1)]
    assert all(len(step.trained) == schedule.groups_per_step for step in steps), "every step is full"
    consumed = sorted(draw for step in steps for draw in (*step.trained, *step.dropped))
    stream = stream_of(schedule)
    drawn = [(draw, task.id) for draw, task in (stream.next() for _ in range(consumed[-1][0] + 1))]
    left_behind = set(drawn) - set(consumed)
    assert sorted([*consumed, *left_behind]) == drawn, "each draw is trained or dropped, once"
    assert len(left_behind) <= schedule.most_left_behind, "each draw is trained or dropped, once"
    for first in range(0, len(drawn) - schedule.num_tasks + 1, schedule.num_tasks):
        epoch = {task for draw, task in drawn if first <= draw < first + schedule.num_tasks}
        assert len(epoch) == schedule.num_tasks, "each prompt is there once in an epoch"
    assert max(age for step in steps for age in step.ages) <= schedule.staleness, "the bound is kept"
    for step in steps if not schedule.controls else ():  # which may have a group wait for a later step
        rounds = 1 + len(step.dropped)
        # A group that is dropped is replaced when it ends, never later.
        assert step.waited <= rounds * schedule.longest_seconds + 1e-3, "nothing waits for what has not been started"


@contextmanager
def on_failure(schedule: Schedule) -> Iterator[None]:
    """Says which schedule it was."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in {schedule}")
        raise
