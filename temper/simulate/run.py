"""One simulated run: the real loop, source and buffer over a virtual clock.

Owns: the plan of the loop with simulated parts. Refuses: recipes; whoever has one says how its source is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

from temper import loop
from temper.interpreter import seldom_collected
from temper.protocols import BatchSource, Trainer
from temper.rollout.buffer import StepGroups
from temper.rollout.episode import EpisodeSetup
from temper.simulate.clock import run_virtual, spend
from temper.simulate.lengths import Lengths, OfferedLengths
from temper.simulate.outcome import SimulatedRun, StepTrace, Tracer, summarize
from temper.simulate.sampler import SamplerLimits, SimulatedSampler
from temper.simulate.speeds import Speeds
from temper.simulate.split import Split
from temper.simulate.trainer import SimulatedTrainer
from temper.simulate.world import Lots, PromptTokens, make_setup
from temper.types import Batch

Credit = Callable[[StepGroups], Batch]
MakeSource = Callable[[EpisodeSetup, Trainer, Credit], BatchSource]
LEAST_SKIPPED = 2


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run to simulate."""

    make_source: MakeSource
    """The stage's own source, over simulated episodes."""
    speeds: Speeds
    lengths: Lengths
    prompt_tokens: PromptTokens
    limits: SamplerLimits
    split: Split
    max_staleness: int
    group_size: int
    steps: int
    """That are counted, after the first ones."""
    updates: int = 1
    """Optimiser steps of a batch."""
    max_new_tokens: int
    degenerate: float = 0.0
    """Share of the groups whose members all have one reward."""
    episode_seconds: float = 1e9
    seed: int = 0

    @property
    def skip(self) -> int:
        """Steps until the buffer is as full as it will be."""
        return max(LEAST_SKIPPED, self.max_staleness + 1)


def simulate(scenario: Scenario) -> SimulatedRun:
    with seldom_collected():
        steps, offered = run_virtual(_run(scenario))
    return summarize(steps, offered, scenario.split, skip=scenario.skip, max_staleness=scenario.max_staleness)


async def _run(scenario: Scenario) -> tuple[list[StepTrace], dict[int, float]]:
    """Its steps, and the mean length of every group that was started, by draw."""
    offered = OfferedLengths(scenario.lengths)
    sampler = SimulatedSampler(scenario.speeds, offered, scenario.limits)
    trainer = SimulatedTrainer(scenario.speeds, trainers=scenario.split.trainers, updates=scenario.updates)
    tracer = Tracer(sampler, trainer)
    setup = make_setup(
        sampler,
        Lots(seconds=scenario.speeds.episode, degenerate=scenario.degenerate, seed=scenario.seed),
        scenario.prompt_tokens,
        max_new_tokens=scenario.max_new_tokens,
        episode_seconds=scenario.episode_seconds,
    )
    credit = make_credit(scenario.speeds, sampler if scenario.split.is_shared else None)
    source = scenario.make_source(setup, trainer, credit)
    await loop.run(
        make_plan(
            source,
            (sampler, trainer),
            recorders=(tracer,),
            steps=scenario.skip + scenario.steps,
            runs_ahead=scenario.max_staleness > 0,
            is_shared=scenario.split.is_shared,
            after_step=scenario.speeds.after_step,
        )
    )
    await sampler.close()
    return tracer.steps, offered.means(scenario.group_size, scenario.max_new_tokens)


def make_plan(
    source: BatchSource,
    sides: tuple[SimulatedSampler, SimulatedTrainer],
    *,
    recorders: tuple[loop.Recorder, ...],
    steps: int,
    runs_ahead: bool,
    is_shared: bool,
    after_step: float = 0.0,
) -> loop.Plan:
    """What the loop runs, from the first step; nothing is evaluated or saved."""
    sampler, trainer = sides
    paused = sampler.paused if is_shared else nullcontext

    async def check() -> None:
        with paused():
            await asyncio.sleep(after_step)

    async def prove() -> None:
        """Nothing is to be proven."""

    return loop.Plan(
        stage=0,
        steps=steps,
        first_step=1,
        source=source,
        trainer=trainer,
        sampler=sampler,
        recorders=recorders,
        evaluate=None,
        evaluate_every=0,
        checkpoint=lambda step: None,
        checkpoint_every=steps,
        parity=prove,
        canary=check,
        verify=lambda step, result: None,
        measure_system=lambda batch, result, seconds: {},
        runs_ahead=runs_ahead,
        paused=paused,
    )


def make_credit(speeds: Speeds, shared: SimulatedSampler | None = None) -> Credit:
    """Credit that is not computed, and takes the time of computing it. `shared`: a sampler on the same device or in the
    same process, which draws nothing meanwhile: side by side neither would be faster."""

    def credit(taken: StepGroups) -> Batch:
        seconds = speeds.credit_token * sum(group.tokens_drawn for group in taken.groups)
        spend(seconds)
        if shared is not None:
            shared.hold_for(seconds)
        return Batch(updates=(), groups=taken.groups, dropped=taken.dropped)

    return credit
