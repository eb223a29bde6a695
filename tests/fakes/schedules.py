"""Random schedules of a run with drops, crashes and resumes, on a virtual clock: the real loop, source and buffer over
groups that are drawn by the simulated sampler.

Owns: drawing a schedule from a seed, and living through it. Groups are not played episode by episode: ten thousand
schedules would take ten times as long, and who is drawn, dropped, trained and drawn again is decided above them.
Refuses: controls by lot (controlled.py), and what must hold of the history that survives (promises.py).
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
from temper.engine.wrapped import WrappedSampler
from temper.rollout.buffer import Buffer
from temper.rollout.controls.control import Control, Setting
from temper.rollout.controls.registry import CONTROLS, read_controls
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
    Completion,
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
    order: Any
    """rollout.order: in another than "draw" a step may leave draws behind that are trained later."""
    controls: tuple[Mapping[str, Any], ...] = ()
    """rollout.controls."""

    @property
    def most_left_behind(self) -> int:
        """Draws that may be under way when a step ends, though later ones were trained."""
        if self.order == "draw":
            return 0
        # Synchronous: fewer than fill a step waited, and then one step put off a step's groups more.
        return (self.staleness + 1) * self.groups_per_step if self.staleness else 2 * self.groups_per_step - 1

    @property
    def most_overtaken(self) -> int:
        """Steps after which a draw is consumed at the latest, counted from the first step that consumed a later one. A
        crash costs one that was running its tokens and so its time; patience is in the checkpoint."""
        if self.order == "draw":
            return 0
        if self.staleness:
            return self.staleness  # it had started before the later one, whose tokens are not older
        # Twice a step's groups may wait when patience ends: the second half has a step of its own.
        return 1 + max(control["patience"] for control in self.controls)


def draw_schedule(seed: int, orders: Sequence[str] = ("draw",)) -> Schedule:
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
        order=lot.choice(orders) if staleness else "draw",  # a synchronous step waits for all of its groups
    )


@dataclass(frozen=True)
class Answer:
    """What a group trains, and what of it was true."""

    draw: int
    versions: tuple[int, ...]
    """Of its tokens, as it says."""
    drawn_by: tuple[int, ...]
    """Of its tokens, as the sampler drew them."""


@dataclass
class Step:
    """One step of the history that survives."""

    trained: list[tuple[int, str]]
    """(draw, task) of each group."""
    dropped: list[tuple[int, str]]
    ages: list[int]
    """Of each group's oldest token, by what the sampler drew."""
    answers: list[Answer]
    waited: float
    """Seconds that the trainer waited for it."""
    num_cut: int
    """Groups that controls gave back while it was filled."""
    first_of_life: int
    """Step with which the process began that did this one."""


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
    controls: tuple[type[Control], ...] = ()
    """In place of those of the same names."""

    def __str__(self) -> str:
        named = [part.__name__ for part in (self.make_buffer, self.make_source, *self.controls)]  # type: ignore[attr-defined]
        return " ".join(name for name in named if name not in ("Buffer", "RolloutSource"))


def live_through(schedule: Schedule, parts: Parts = Parts()) -> History:
    """Runs to the last step, through all crashes. Raises what ends the run before that."""
    with (
        asyncio.Runner(loop_factory=VirtualLoop) as runner,
        patch("temper.rollout.source.run_group", _run_group),
        patch.dict(CONTROLS, {control.name: control for control in parts.controls}),
    ):
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
        self._sampler = SimulatedSampler(speeds, lengths_of(schedule), SamplerLimits(max_running=10_000))
        self._trainer = SimulatedTrainer(speeds, version=saved.step)
        self._witness = Witness(self._sampler)
        setup = make_setup(self._witness, _Lot(schedule), lambda task: 1, max_new_tokens=1000, episode_seconds=1e9)
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
        credit, controls = make_credit(speeds), read_controls(schedule.controls, _setting_of(schedule))
        source = parts.make_source(setup, stream_of(schedule), buffer, settings, credit, controls=controls)
        self._source = _Timed(source)
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
        version, answers = report.version - 1, [self._witness.compare(group) for group in batch.groups]
        self._history.steps[report.step] = Step(
            trained=[(group.draw, group.task.id) for group in batch.groups],
            dropped=[(group.draw, group.task.id) for group, _ in batch.dropped],
            ages=[version - min(answer.drawn_by) for answer in answers],
            answers=answers,
            waited=self._source.waited,
            num_cut=int(batch.system.get("flow/cut", 0)),
            first_of_life=self._checkpoints[0].step + 1,
        )

    def evaluation(self, result: EvaluationResult) -> None:
        """Nothing is held out."""


class Witness(WrappedSampler):
    """Below all controls: knows which version drew which token of a group, in how many pieces ever."""

    def __init__(self, sampler: SimulatedSampler) -> None:
        super().__init__(sampler)
        self._drawn: dict[str, tuple[int, ...]] = {}

    async def generate(self, request: Request) -> Completion:
        piece = await self._sampler.generate(request)
        before = self._drawn.get(request.id, ()) if len(request.prompt_ids) > 1 else ()
        self._drawn[request.id] = (*before, *piece.versions)
        return piece

    def compare(self, group: Group) -> Answer:
        told = group.trajectories[0].turns[0].completion.versions
        return Answer(group.draw, tuple(told), self._drawn[_request_id(group.draw)])


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


def _setting_of(schedule: Schedule) -> Setting:
    """The sampler's pressure is by lot: nothing that it says may break a promise."""
    lot = random.Random(schedule.seed)
    moods = [{}, {"preemptions": 1.0}, {"kv_use": 0.99}, {"kv_use": 0.1}, {"kv_use": 0.1, "waiting": 3.0}]
    return Setting(
        groups_per_step=schedule.groups_per_step,
        max_staleness=schedule.staleness,
        order=schedule.order,
        pressure=lambda: lot.choice(moods),
    )


def lengths_of(schedule: Schedule) -> Lengths:
    """Tokens of a group by its draw; a few are long."""

    def length(group: str, member: int) -> int:
        lot = random.Random(schedule.seed * 1_000_003 - member).random()
        return 1 + int((MOST_TOKENS - 1) * lot**3)

    return length


async def _run_group(setup: EpisodeSetup, task: Task, *, draw: int, group_size: int, **_: Any) -> Group:
    """In place of run_group: one request for all members, no environment, a reward by lot."""
    assert isinstance(setup.scorer, _Lot)
    request = Request(id=_request_id(draw), prompt_ids=(1,), params=setup.params)
    turn = Turn(completion=await setup.sampler.generate(request), message=Message(role="assistant", content="."))
    score = Score.unscorable("by lot") if setup.scorer.drops(draw) else Score.of(1.0)
    members = tuple(
        Trajectory(task_id="t", group_id="g", index=index, turns=(turn,), status=Status.COMPLETED, score=score)
        for index in range(group_size)
    )
    return Group(id=f"{task.id}#{draw}", draw=draw, task=task, trajectories=members)


def _request_id(draw: int) -> str:
    return f"g/{draw}/0"


@cache
def _tasks(num_tasks: int) -> tuple[Task, ...]:
    return tuple(Task(id=f"t{i}", messages=(Message(role="user", content=str(i)),)) for i in range(num_tasks))


def stream_of(schedule: Schedule) -> Stream:
    return Stream([FileSource("tasks", _tasks(schedule.num_tasks))], [1.0], seed=schedule.seed)


@contextmanager
def on_failure(schedule: Schedule) -> Iterator[None]:
    """Says which schedule it was."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in {schedule}")
        raise
