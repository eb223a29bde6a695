"""What a simulated run was like, in numbers.

Owns: the record of every step, and shares of time between two of them. Refuses: words (table.py).
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from temper.simulate.sampler import SimulatedSampler
from temper.simulate.split import Split
from temper.simulate.trainer import SimulatedTrainer
from temper.types import Batch, EvaluationResult, StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """Totals since the start when a step was reported, and what it trained."""

    time: float
    sampler_busy: float
    """Seconds of all its GPUs together."""
    trainer_busy: float
    tokens_drawn: int
    """Of the groups of this step, trained and dropped."""
    ages: tuple[int, ...]
    """By trained answer: versions since its oldest token."""
    groups_dropped: int


class Tracer:
    """Implements loop.Recorder."""

    def __init__(self, sampler: SimulatedSampler, trainer: SimulatedTrainer) -> None:
        self._sampler, self._trainer = sampler, trainer
        self.steps: list[StepTrace] = []

    def append(self, report: StepReport, batch: Batch) -> None:
        version = self._trainer.version - 1
        members = [member for group in batch.groups for member in group.trainable]
        everyone = (*batch.groups, *(group for group, _ in batch.dropped))
        self.steps.append(
            StepTrace(
                time=asyncio.get_running_loop().time(),
                sampler_busy=self._sampler.totals()["busy_seconds"],
                trainer_busy=self._trainer.busy_seconds,
                tokens_drawn=sum(group.tokens_drawn for group in everyone),
                ages=tuple(version - member.oldest_version for member in members),
                groups_dropped=len(batch.dropped),
            )
        )

    def evaluation(self, result: EvaluationResult) -> None:
        """Nothing is held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """Means over the steps of a run after its first ones."""

    max_staleness: int
    """S."""
    gpus: int
    samplers: int
    trainers: int
    is_shared: bool
    """Whether both sides use the same GPUs in turn."""
    parts: bool
    """Whether each trainer holds a part of weights and states, in place of all."""
    seconds_per_step: float
    tokens_per_second: float
    """Tokens drawn, of dropped groups too."""
    sampler_idle: float
    """Share of the time of its GPUs in which they drew nothing; the same below."""
    trainer_idle: float
    stale_mean: float
    """Versions since the oldest token of an answer when it was trained."""
    stale_max: int
    groups_dropped: float
    """In each step."""

    @property
    def mode(self) -> str:
        return f"async, S = {self.max_staleness}" if self.max_staleness else "sync"


def summarize(steps: Sequence[StepTrace], split: Split, *, skip: int, max_staleness: int) -> SimulatedRun:
    """Over the steps after the first `skip`: a run that has just begun waits for its first groups."""
    first, last, counted = steps[skip - 1], steps[-1], steps[skip:]
    assert counted, "there must be steps after those that are skipped"
    elapsed = last.time - first.time
    ages = [age for step in counted for age in step.ages]
    return SimulatedRun(
        max_staleness=max_staleness,
        gpus=split.samplers if split.is_shared else split.samplers + split.trainers,
        samplers=split.samplers,
        trainers=split.trainers,
        is_shared=split.is_shared,
        parts=split.parts,
        seconds_per_step=elapsed / len(counted),
        tokens_per_second=sum(step.tokens_drawn for step in counted) / elapsed,
        sampler_idle=1 - (last.sampler_busy - first.sampler_busy) / (elapsed * split.samplers),
        trainer_idle=1 - (last.trainer_busy - first.trainer_busy) / elapsed,
        stale_mean=statistics.fmean(ages),
        stale_max=max(ages),
        groups_dropped=statistics.fmean(step.groups_dropped for step in counted),
    )
