"""THE loop: take a batch, train, publish, record, go on. The same for every stage and every staleness bound.

Owns: the order of things in a step. Refuses: knowing where batches come from or where weights go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from temper.interpreter import quick_turns, seldom_collected
from temper.protocols import BatchSource, Sampler, Trainer
from temper.runs.stopwatch import Stopwatch
from temper.types import Batch, EvaluationResult, StepReport, TrainResult

SAVING_SECONDS = 3600.0
"""For a checkpoint that is being written when the run is stopped."""


class Recorder(Protocol):
    """Whoever wants to know what happened: the run store, the display."""

    def append(self, report: StepReport, batch: Batch) -> None: ...
    def evaluation(self, result: EvaluationResult) -> None: ...


class Watch(Protocol):
    """Whoever may stop a run that goes wrong: the alarms."""

    @property
    def is_called(self) -> bool: ...
    async def hold(self) -> None:
        """Returns when the run shall go on, within a deadline; raises what ends it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One stage, ready to run."""

    stage: int
    steps: int
    """Last step of the stage, counted from 1."""
    first_step: int
    """1, or one after the step that was resumed."""
    source: BatchSource
    trainer: Trainer
    sampler: Sampler
    recorders: tuple[Recorder, ...]
    evaluate: Callable[[int, Mapping[str, float]], Awaitable[list[EvaluationResult]]] | None
    """Held-out scores of the weights the sampler holds, given a step and its metrics; None without a held-out set."""
    evaluate_every: int
    """0: only at both ends of the stage."""
    checkpoint: Callable[[int], None]
    checkpoint_every: int
    parity: Callable[[], Awaitable[None]]
    """Refuses to start when sampler and trainer disagree."""
    canary: Callable[[], Awaitable[None]]
    """Refuses to go on when they disagree after a publication. Done before anything is trained, evaluated or saved; a
    source that runs ahead makes its next batch meanwhile."""
    verify: Callable[[int, TrainResult], None]
    """Refuses to go on when they disagree after a step."""
    measure_system: Callable[[Batch, TrainResult, Mapping[str, float]], dict[str, float]]
    """Throughput and memory of a step, from its batch, what the trainer did with it, and its seconds."""
    watch: Watch | None = None
    warm_up: Callable[[], Awaitable[None]] | None = None
    """Compiles and records what the first step would otherwise wait for. None: there is nothing to compile."""
    runs_ahead: bool = False
    """The sampler draws for later steps as well, and begins with them as soon as it has new weights."""
    paused: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around a trainer's step: a sampler on the trainer's device draws nothing inside."""


async def run(plan: Plan) -> None:
    """Runs one stage to its last step.

    Waits for: the source's next batch. Unblocked by: the source, within its own deadline. Ends: at plan.steps, or when
    a part breaks; the last checkpoint is then where a resume goes on.
    """
    with seldom_collected(), quick_turns():
        await _run(plan)


async def _run(plan: Plan) -> None:
    clock = Stopwatch()  # from report to report: what follows a report is in the seconds of the step after it
    if plan.warm_up is not None:
        await plan.warm_up()
    clock.lap("warm_up")
    await plan.sampler.load(plan.trainer.publish())
    await plan.parity()
    clock.lap("parity")
    if plan.first_step == 1:
        await _evaluate(plan, step=0, metrics={})
    clock.lap("evaluate")
    await plan.source.start()
    canary = _Canary(plan)
    try:
        for step in range(plan.first_step, plan.steps + 1):
            clock.skip()
            batch = await plan.source.take(step)
            if batch.seconds:
                clock.lap_as(batch.seconds)
            else:
                clock.lap("data")
            await canary.passed()
            clock.lap("canary")
            with plan.paused():
                result = await asyncio.to_thread(plan.trainer.step, batch)
            plan.verify(step, result)
            clock.lap("train_other", inside=result.seconds)
            await plan.sampler.load(plan.trainer.publish())
            clock.lap("publish")
            canary.start()
            is_looked_at = step == plan.steps or (plan.evaluate_every and step % plan.evaluate_every == 0)
            if plan.runs_ahead:
                await plan.source.release(plan.trainer.version)
            if is_looked_at or not plan.runs_ahead:
                await canary.passed()
            clock.lap("canary")
            report = _report(plan, step, batch, result, clock.report())
            for recorder in plan.recorders:
                recorder.append(report, batch)
            clock.lap("record")
            if is_looked_at:
                await _evaluate(plan, step, report.metrics)
            clock.lap("evaluate")
            await _close_step(plan, step, canary, clock)
    finally:
        await canary.close()
        await plan.source.close()


async def _close_step(plan: Plan, step: int, canary: _Canary, clock: Stopwatch) -> None:
    """A checkpoint, where one is due, and then the next step.

    In this order: while a synchronous source is saved nothing is drawn, and what is saved is how this step ended.
    """
    is_held = plan.watch is not None and plan.watch.is_called
    if step == plan.steps or step % plan.checkpoint_every == 0 or is_held:
        await canary.passed()
        await _to_its_end(asyncio.to_thread(plan.checkpoint, step))
    clock.lap("checkpoint")
    if plan.watch is not None and is_held:
        await plan.watch.hold()
    await plan.source.release(plan.trainer.version)
    clock.lap("release")


async def _to_its_end(saving: Coroutine[None, None, None]) -> None:
    """Waits for a checkpoint, also when the run is stopped meanwhile: what it reads must not be closed under it."""
    task = asyncio.ensure_future(saving)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=SAVING_SECONDS)
        raise


class _Canary:
    """The check of the newest publication, on its way."""

    def __init__(self, plan: Plan) -> None:
        self._check = plan.canary
        self._running: asyncio.Future[None] | None = None

    def start(self) -> None:
        self._running = asyncio.ensure_future(self._check())

    async def passed(self) -> None:
        """Waits for: the check, which has a deadline. Raises what it found."""
        if self._running is not None:
            running, self._running = self._running, None
            await running

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running], timeout=30.0)


async def _evaluate(plan: Plan, step: int, metrics: Mapping[str, float]) -> None:
    if plan.evaluate is None:
        return
    for result in await plan.evaluate(step, metrics):
        for recorder in plan.recorders:
            recorder.evaluation(result)


def _report(plan: Plan, step: int, batch: Batch, result: TrainResult, seconds: dict[str, float]) -> StepReport:
    return StepReport(
        stage=plan.stage,
        step=step,
        version=plan.trainer.version,
        loss=result.loss,
        metrics={**batch.metrics, **result.metrics},
        seconds=seconds,
        system=plan.measure_system(batch, result, seconds),
        groups_trained=len(batch.groups),
        groups_dropped=len(batch.dropped),
        max_staleness=int(batch.metrics.get("stale/max", 0)),
        traces=result.traces,
        loads=result.loads,
    )
