"""What a simulated run was like, in numbers.

Owns: the record of every step, and shares of time between two of them. Refuses: words (table.py).
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
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
    decoded: float
    """Tokens that were drawn, also for groups that were cut or still run."""
    tokens_drawn: int
    """Of the groups of this step, trained and dropped."""
    lengths: Mapping[int, float]
    """Mean length of the answers of each trained group, by draw."""
    tokens_trained: int
    dropped: tuple[int, ...]
    """Draws whose groups were not trained."""
    ages: tuple[int, ...]
    """By trained answer: versions since its oldest token."""


class Tracer:
    """Implements loop.Recorder."""

    def __init__(self, sampler: SimulatedSampler, trainer: SimulatedTrainer) -> None:
        self._sampler, self._trainer = sampler, trainer
        self.steps: list[StepTrace] = []

    def append(self, report: StepReport, batch: Batch) -> None:
        version = self._trainer.version - 1
        members = [member for group in batch.groups for member in group.trainable]
        everyone = (*batch.groups, *(group for group, _ in batch.dropped))
        totals = self._sampler.totals()
        self.steps.append(
            StepTrace(
                time=asyncio.get_running_loop().time(),
                sampler_busy=totals["busy_seconds"],
                trainer_busy=self._trainer.busy_seconds,
                decoded=totals["decode_tokens"],
                tokens_drawn=sum(group.tokens_drawn for group in everyone),
                lengths={
                    group.draw: statistics.fmean(t.num_tokens for t in group.trajectories) for group in batch.groups
                },
                tokens_trained=sum(member.num_tokens for member in members),
                dropped=tuple(group.draw for group, _ in batch.dropped),
                ages=tuple(version - member.oldest_version for member in members),
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
    drawn_per_trained: float
    """Tokens drawn, also for groups that were cut or dropped, over those that were trained."""
    length_ratio: float
    """Mean length of what the steps trained over that of what they would have trained in draw order: 1 where nobody is
    favoured. Of a few steps it is 1 in draw order only; of an epoch it is near 1 where nobody is lost."""
    shortest_step: float
    """Mean length of the step with the shortest answers, over that of all steps; the same below."""
    longest_step: float

    @property
    def mode(self) -> str:
        return f"async, S = {self.max_staleness}" if self.max_staleness else "sync"


def summarize(
    steps: Sequence[StepTrace], offered: Mapping[int, float], split: Split, *, skip: int, max_staleness: int
) -> SimulatedRun:
    """Over the steps after the first `skip`: a run that has just begun waits for its first groups.

    `offered`: mean length of the answers of every group that was started, by draw.
    """
    first, last, counted = steps[skip - 1], steps[-1], steps[skip:]
    assert counted, "there must be steps after those that are skipped"
    elapsed = last.time - first.time
    ages = [age for step in counted for age in step.ages]
    lengths = [statistics.fmean(step.lengths.values()) for step in counted]
    return SimulatedRun(
        max_staleness=max_staleness,
        gpus=split.samplers if split.is_shared else split.samplers + split.trainers,
        samplers=split.samplers,
        trainers=split.trainers,
        is_shared=split.is_shared,
        parts=split.parts,
        seconds_per_step=elapsed / len(counted),
        tokens_per_second=sum(step.tokens_drawn for step in counted) / elapsed,
        sampler_idle=max(0.0, 1 - (last.sampler_busy - first.sampler_busy) / (elapsed * split.samplers)),
        trainer_idle=max(0.0, 1 - (last.trainer_busy - first.trainer_busy) / elapsed),
        stale_mean=statistics.fmean(ages),
        stale_max=max(ages),
        groups_dropped=statistics.fmean(len(step.dropped) for step in counted),
        drawn_per_trained=(last.decoded - first.decoded) / sum(step.tokens_trained for step in counted),
        length_ratio=ratio_to_draw_order(steps, offered, skip),
        shortest_step=min(lengths) / statistics.fmean(lengths),
        longest_step=max(lengths) / statistics.fmean(lengths),
    )


def ratio_to_draw_order(steps: Sequence[StepTrace], offered: Mapping[int, float], skip: int) -> float:
    """Mean length of what the steps after the first `skip` trained, over that of what would have been theirs if every
    group had been trained in the order in which it was drawn."""
    dropped = {draw for step in steps for draw in step.dropped}
    in_draw_order = [offered[draw] for draw in sorted(offered) if draw not in dropped]
    before = sum(len(step.lengths) for step in steps[:skip])
    trained = [length for step in steps[skip:] for length in step.lengths.values()]
    return statistics.fmean(trained) / statistics.fmean(in_draw_order[before : before + len(trained)])
