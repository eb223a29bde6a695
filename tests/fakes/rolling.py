"""Rollouts over a virtual clock: a source of batches as a stage wires it, and a trainer that only takes its time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from temper.envs.env import find_env
from temper.rollout.buffer import Buffer
from temper.rollout.controls.control import Setting
from temper.rollout.controls.registry import read_controls
from temper.rollout.episode import EpisodeSetup
from temper.rollout.source import RolloutSettings, RolloutSource
from temper.tasks.dataset import FileSource, Stream
from temper.types import Batch, Publication, SamplingParams, Score, Task, Trajectory
from tests.fakes.episodes import FakeScorer, Letters, ask
from tests.fakes.tail import STOP, TailSampler, heavy_tail

_SINGLE_TURN = find_env("single_turn", {})
FOREVER = 1e6
"""Seconds of the virtual clock."""


class Judge(FakeScorer):
    """Half of every group is right, unless its task is named as one that teaches nothing."""

    def __init__(self, is_degenerate: Callable[[Task], bool]) -> None:
        self._is_degenerate = is_degenerate

    async def score(self, task: Task, trajectory: Trajectory) -> tuple[Score, Mapping[str, Score]]:
        score = Score.of(0.0 if self._is_degenerate(task) else float(trajectory.index % 2))
        return score, {"judge": score}


@dataclass(kw_only=True)
class Flow:
    """What a source is made of. Tasks are called t0, t1, ...; each epoch draws every one of them once."""

    groups_per_step: int = 4
    staleness: int = 2
    order: Any = "finished"
    num_tasks: int = 40
    seed: int = 0
    max_new_tokens: int = 1000
    controls: Sequence[Any] = ()
    pressure: Callable[[], Mapping[str, float]] = dict
    drops: Callable[[Task], bool] = lambda task: False
    params: Mapping[str, Any] = field(default_factory=dict)
    make_source: Callable[..., RolloutSource] = RolloutSource

    def open(self, sampler: TailSampler, version: int = 0) -> RolloutSource:
        params = SamplingParams(max_new_tokens=self.max_new_tokens, stop_ids=(STOP,), **self.params)
        setup = EpisodeSetup(
            sampler=sampler, renderer=Letters(), scorer=Judge(self.drops), params=params,
            make_env=lambda name: _SINGLE_TURN(), max_turns=1, episode_seconds=FOREVER, seed=0,
        )  # fmt: skip
        tasks = tuple(ask("?", name=f"t{number}") for number in range(self.num_tasks))
        buffer = Buffer(
            groups_per_step=self.groups_per_step, max_staleness=self.staleness, max_rounds=100, version=version,
            order=self.order,
        )  # fmt: skip
        settings = RolloutSettings(
            group_size=2, min_members=2, drop_degenerate=True, error_limit=0.2, step_seconds=FOREVER, prefix="stage 0",
        )  # fmt: skip
        stream = Stream([FileSource("tasks", tasks)], [1.0], seed=self.seed)
        setting = Setting(
            groups_per_step=self.groups_per_step, max_staleness=self.staleness, order=self.order,
            decode=Letters().decode, pressure=self.pressure,
        )  # fmt: skip
        return self.make_source(
            setup, stream, buffer, settings, _plain_batch, controls=read_controls(self.controls, setting)
        )


def _plain_batch(taken: Any) -> Batch:
    return Batch(updates=(), groups=taken.groups, dropped=taken.dropped)


@dataclass
class Run:
    """What came of some steps."""

    batches: list[Batch] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Version of the weights that each batch trained."""
    seconds: float = 0.0
    waited: float = 0.0
    """Seconds in which the trainer had nothing to do."""
    state: Any = None
    """Of the source after the last step."""

    @property
    def trained(self) -> list[int]:
        return [group.draw for batch in self.batches for group in batch.groups]

    @property
    def consumed(self) -> list[int]:
        return self.trained + [group.draw for batch in self.batches for group, _ in batch.dropped]

    @property
    def ages(self) -> list[int]:
        """Of every trained token, in versions."""
        return [
            version - by
            for version, batch in zip(self.versions, self.batches, strict=True)
            for group in batch.groups
            for member in group.trajectories
            for by in member.turns[0].completion.versions
        ]

    @property
    def lengths(self) -> list[int]:
        return [t.num_tokens for batch in self.batches for group in batch.groups for t in group.trajectories]


async def train(
    source: RolloutSource, sampler: TailSampler, steps: Sequence[int], train_seconds: float = 4.0
) -> Run:  # fmt: skip
    """These steps, as the loop takes them; then the process is killed, as it were: nothing is left but `state`."""
    run, started = Run(), asyncio.get_running_loop().time()
    await source.start()
    try:
        for step in steps:
            asked = asyncio.get_running_loop().time()
            run.batches.append(await source.take(step))
            run.waited += asyncio.get_running_loop().time() - asked
            run.versions.append(step - 1)
            await asyncio.sleep(train_seconds)
            await sampler.load(Publication(version=step, tensors={}))
            await source.release(step)
            run.state = source.state()
    finally:
        await source.close()
    run.seconds = asyncio.get_running_loop().time() - started
    return run


async def train_with_kills(control: Setting, seed: int, steps: int) -> tuple[list[int], list[dict[str, float]]]:
    """Draws that were consumed, and what each step told, over a source that is killed and resumed every few steps."""
    random_, sampler = random.Random(seed), TailSampler(heavy_tail(0.2))
    flow = Flow(groups_per_step=4, staleness=0, seed=seed, controls=[control], drops=lambda task: task.id.endswith("3"))
    consumed, systems, state, step = list[int](), list[dict[str, float]](), None, 1
    while step < steps:
        source = flow.open(sampler, version=step - 1)
        if state is not None:
            source.load_state(state)
        until = step + random_.randrange(1, 4)
        part = await train(source, sampler, range(step, until), 2.0)
        consumed += part.consumed
        systems += [dict(batch.system) for batch in part.batches]
        state, step = part.state, until
    return consumed, systems
