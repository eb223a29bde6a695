"""The reinforcement-learning source of batches: feeds tasks, rolls groups, hands finished steps to the loop.

Owns: the feeder task, the failure limit, giving draws back, the metrics of generation. Refuses: training and publishing
(loop.py), deciding what is sampled when (controls/).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace

from temper.batching.measure import RecentPrompts
from temper.calls import describe_error, is_end_of_task
from temper.errors import BackendError, TaskError
from temper.rollout.bias import LengthRatio
from temper.rollout.buffer import NOT_TRAINED, Buffer, StepGroups
from temper.rollout.controls.control import PutOff
from temper.rollout.controls.together import PREFIX, Controls
from temper.rollout.draws import State, TaskDraws, TaskStream
from temper.rollout.episode import EpisodeSetup
from temper.rollout.group import NOTHING, Extras, reason_to_drop, run_group
from temper.tasks.choice.memory import PromptMemory
from temper.types import Batch, Group, PromptHistory, Scalar, ScoreKind, Task

LONGEST_STEP_SECONDS = 7 * 24 * 3600.0
"""The feeder sleeps through training and evaluation; a run that stands still longer than this is dead."""

RECENT = "recent prompts"
"""Name under which the list of recent prompts is kept, beside the state of the task stream."""
LENGTHS = "recent lengths"
"""The same of recent answers' lengths."""


class StepFailure(BackendError):
    """No batch could be made of what was rolled."""

    def __init__(self, text: str, step: int, groups: Sequence[tuple[Group, str]]) -> None:
        super().__init__(text)
        self.step = step
        self.groups = groups
        """Groups that were rolled and not trained, each with what became of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    group_size: int
    min_members: int
    drop_degenerate: bool
    error_limit: float
    step_seconds: float
    prefix: str
    """Start of every request id: the stage, so that two stages never draw the same numbers."""
    extras: Extras = NOTHING


class RolloutSource:
    """Implements protocols.BatchSource."""

    def __init__(
        self, setup: EpisodeSetup, stream: TaskStream, buffer: Buffer, settings: RolloutSettings,
        make_batch: Callable[[StepGroups], Batch], *,
        memory: PromptMemory | None = None, controls: Controls = Controls(),
    ) -> None:  # fmt: skip
        """`memory`: of the prompts that are drawn; None: no reward judges them, and there is nothing to remember."""
        self._setup = setup
        self._draws = TaskDraws(stream)
        self._buffer = buffer
        self._settings = settings
        self._make_batch = make_batch
        self._controls = controls
        self._recent = RecentPrompts()
        self._lengths = LengthRatio()
        self._memory = memory
        self.num_queued = 0
        """Finished groups that waited when the last batch was taken."""
        self._rolling: dict[int, asyncio.Task[object]] = {}
        """Tasks of groups that have really begun: one that is cancelled before would end without a word."""
        self._cut: set[int] = set()
        """Draws whose groups are being given back."""
        self._begun = -1
        """Version at which the newest step began."""
        self._feeder: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._buffer.refills_together &= not self._controls.all
        await self._begin()
        self._feeder = asyncio.create_task(self._feed(), name="roller")

    async def take(self, step: int) -> Batch:
        started = time.monotonic()
        taken = await self._take(step)
        rolled = time.monotonic()
        await self._controls.filled(taken, self.num_queued)
        if self._buffer.max_staleness == 0:
            await self._give_rest_back()
        batch = await asyncio.to_thread(self._make_batch, taken)
        await self._learn(taken)
        seconds = {"rollout": rolled - started, "credit": time.monotonic() - rolled, **batch.seconds}
        self._draws.consume(group.draw for group in taken.everything)
        histories, remembered = self._remember(taken, step)
        return Batch(
            updates=batch.updates,
            groups=batch.groups,
            dropped=batch.dropped or taken.dropped,  # credit may drop more, e.g. groups without a pair
            seconds=seconds,
            metrics={**batch.metrics, **self._recent.measure(batch.groups), **remembered},
            system=self._measure_flow(taken),
            histories=histories,
        )

    def _measure_flow(self, taken: StepGroups) -> dict[str, float]:
        """What controls did, and what came of it that groups may be overtaken."""
        if self._buffer.order == "draw":
            return self._controls.metrics()
        overtaken = {"flow/overtaken": float(self._draws.num_overtaken)}
        return {**overtaken, **self._lengths.measure(taken.groups), **self._controls.metrics()}

    def _remember(self, taken: StepGroups, step: int) -> tuple[tuple[PromptHistory, ...], dict[str, float]]:
        """Histories of the prompts that the step consumed, and metrics of what its draws passed over."""
        if self._memory is None:
            return (), {}
        return self._memory.learn(step, taken.everything)

    async def _take(self, step: int) -> StepGroups:
        """What the step consumes. When there is no step, what was rolled for it goes with the error: people read it."""
        taken = None
        try:
            taken = await self._or_failure(self._buffer.take(self._settings.step_seconds))
            self.num_queued = self._buffer.num_finished
            self._check_failures(taken, step)
        except BackendError as error:
            groups = _outcomes(taken) if taken else self._buffer.settled()
            raise StepFailure(str(error), step, groups) from error
        return taken

    async def release(self, version: int) -> None:
        await self._buffer.release(version)
        await self._begin()

    async def _begin(self) -> None:
        """The next step begins, once for each version."""
        if self._begun != self._buffer.version:
            self._begun = self._buffer.version
            self._controls.begin(self._begun)
        await self._buffer.steer(lead=self._controls.lead(), most_running=self._controls.most_running())

    async def _give_rest_back(self) -> None:
        """What a synchronous step leaves over would be too old for the next: it is drawn anew."""
        for group in await self._buffer.withdraw_finished():
            self._give_back(group.draw, group.task)
        for draw in self._buffer.running:
            self._cut.add(draw)
            if draw in self._rolling:
                self._rolling[draw].cancel()

    def _give_back(self, draw: int, task: Task) -> None:
        self._draws.give_back(draw, task)
        self._controls.put_off(draw)

    async def _learn(self, taken: StepGroups) -> None:
        """Rewards that learn see what was trained. A judge that fails here is the judge's fault, not the task's."""
        try:
            await asyncio.wait_for(self._evolve(taken), self._settings.step_seconds)
        except TaskError as error:
            raise BackendError(f"a reward could not learn from this step: {error}") from error

    async def _evolve(self, taken: StepGroups) -> None:
        await self._setup.scorer.evolve(sorted(taken.groups, key=lambda group: group.draw))

    def state(self) -> dict[str, Scalar | list[Scalar]]:
        """The draws that are not consumed yet, what is known of prompts and answers, and what controls remember."""
        known: dict[str, Scalar | list[Scalar]] = {RECENT: [*self._recent.state()], LENGTHS: self._lengths.state()}
        memory = self._memory.state() if self._memory else {}
        return {**self._draws.state(), **known, **memory, **self._controls.state()}

    def load_state(self, state: State) -> None:
        recent, lengths = state.get(RECENT, []), state.get(LENGTHS, [])
        self._recent.load_state([str(line) for line in recent] if isinstance(recent, list) else [])
        self._lengths.load_state(lengths if isinstance(lengths, list) else [])
        self._controls.load_state(state)
        others = (RECENT, LENGTHS)
        self._draws.load_state({k: v for k, v in state.items() if k not in others and not k.startswith(PREFIX)})
        if self._memory is not None:
            self._memory.load_state(state)

    async def close(self) -> None:
        if self._feeder is not None:
            self._feeder.cancel()
            await asyncio.wait([self._feeder], timeout=30.0)

    async def _feed(self) -> None:
        """Starts groups as long as the buffer has room. Ends with the run, or with the first broken backend."""
        async with asyncio.TaskGroup() as groups:
            while True:
                for _ in range(await self._buffer.wait_for_room(LONGEST_STEP_SECONDS)):
                    draw, task = self._draws.next(self._controls.may_start)
                    self._controls.started(draw)
                    await self._buffer.start(draw)
                    groups.create_task(self._roll(draw, task), name=f"group {draw}")

    async def _roll(self, draw: int, task: Task) -> None:
        rolling = asyncio.current_task()
        assert rolling is not None, "a group is a task of its own"
        self._rolling[draw] = rolling
        try:
            if draw in self._cut:
                raise PutOff(f"draw {draw} was cut before it began")
            await self._buffer.finish(*await self._rolled(draw, task))
        except BaseException as error:
            if not _is_put_off(error) and not (draw in self._cut and isinstance(error, asyncio.CancelledError)):
                raise
            # Only now: what it asked the sampler for has ended, and may be asked for again by the same names.
            await self._buffer.withdraw(draw)
            self._give_back(draw, task)
        finally:
            self._cut.discard(draw)
            del self._rolling[draw]

    async def _rolled(self, draw: int, task: Task) -> tuple[Group, str | None]:
        """The group, and why it is not trained, if so."""
        settings, setup = self._settings, self._setup
        try:
            group = await run_group(
                replace(setup, sampler=self._controls.wrap(draw, setup.sampler)),
                task,
                draw=draw,
                group_size=settings.group_size,
                prefix=settings.prefix,
                extras=settings.extras,
            )
        except BaseException as error:
            if is_end_of_task(error) or isinstance(error, Exception):
                raise
            # A task that ends as cancelled ends quietly, and the run would wait for its group.
            raise BackendError(f"group {draw} of task {task.id} ended with {describe_error(error)}") from error
        reason = reason_to_drop(group, min_members=settings.min_members, drop_degenerate=settings.drop_degenerate)
        return group, reason

    async def _or_failure(self, waiting: Coroutine[None, None, StepGroups]) -> StepGroups:
        """Waits for the buffer, or for the feeder to break, whichever comes first."""
        assert self._feeder is not None, "start() comes first"
        taking = asyncio.create_task(waiting)
        await asyncio.wait(
            {taking, self._feeder}, return_when=asyncio.FIRST_COMPLETED, timeout=self._settings.step_seconds + 60
        )
        if self._feeder.done() and not taking.done():
            taking.cancel()
            error = None if self._feeder.cancelled() else self._feeder.exception()
            raise _first_cause(error) from error
        return taking.result()

    def _check_failures(self, taken: StepGroups, step: int) -> None:
        """Stops the run when too many episodes could not be scored: a broken verifier must not pass for a hard task."""
        groups = taken.everything
        baselines = [group.greedy for group in groups if group.greedy is not None]
        trajectories = [*(t for group in groups for t in group.trajectories), *baselines]
        failed = [t for t in trajectories if t.score.kind is ScoreKind.ERROR]
        if len(failed) > self._settings.error_limit * len(trajectories):
            reasons = Counter(str(t.score.reason) for t in failed).most_common(3)
            listed = "; ".join(f"{count} x {reason}" for reason, count in reasons)
            raise BackendError(
                f"step {step}: {len(failed)} of {len(trajectories)} episodes failed, more than "
                f"rollout.error_limit={self._settings.error_limit:g}. {listed}. First: task {failed[0].task_id}"
            )


def _outcomes(taken: StepGroups) -> list[tuple[Group, str]]:
    return [*((group, NOT_TRAINED) for group in taken.groups), *((g, f"dropped:{why}") for g, why in taken.dropped)]


def _is_put_off(error: BaseException) -> bool:
    """Whether controls ended a group, and nothing else happened in it."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_put_off(inner) for inner in error.exceptions)
    return isinstance(error, PutOff)


def _first_cause(error: BaseException | None) -> BaseException:
    """The error inside nested task groups that a user should read."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error or BackendError("the roller ended before the run")
