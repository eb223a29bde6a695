"""The reinforcement-learning source of batches: feeds tasks, rolls groups, hands finished steps to the loop.

Owns: the feeder task, the failure limit, the metrics of generation. Refuses: training and publishing (loop.py).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from temper.batching.measure import RecentPrompts
from temper.calls import describe_error, is_end_of_task
from temper.errors import BackendError, TaskError
from temper.rollout.buffer import NOT_TRAINED, Buffer, StepGroups
from temper.rollout.episode import EpisodeSetup
from temper.rollout.group import NOTHING, Extras, reason_to_drop, run_group
from temper.types import Batch, Group, Scalar, ScoreKind, Task

LONGEST_STEP_SECONDS = 7 * 24 * 3600.0
"""The feeder sleeps through training and evaluation; a run that stands still longer than this is dead."""

RECENT = "recent prompts"
"""Name under which the list of recent prompts is kept, beside the state of the task stream."""

State = Mapping[str, Scalar | list[Scalar]]


class StepFailure(BackendError):
    """No batch could be made of what was rolled."""

    def __init__(self, text: str, step: int, groups: Sequence[tuple[Group, str]]) -> None:
        super().__init__(text)
        self.step = step
        self.groups = groups
        """Groups that were rolled and not trained, each with what became of it."""


class TaskStream(Protocol):
    """A resumable order of tasks; tasks/dataset.py implements it."""

    def next(self) -> tuple[int, Task]: ...
    def state(self) -> dict[str, Scalar | list[Scalar]]: ...
    def load_state(self, state: State) -> None: ...


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
        make_batch: Callable[[StepGroups], Batch],
    ) -> None:  # fmt: skip
        self._setup = setup
        self._stream = stream
        self._buffer = buffer
        self._settings = settings
        self._make_batch = make_batch
        self._recent = RecentPrompts()
        self.num_queued = 0
        """Finished groups that waited when the last batch was taken."""
        self._stream_states: dict[int, dict[str, Scalar | list[Scalar]]] = {}
        """State of the task stream before each draw that is not consumed yet."""
        self._drawing = threading.Lock()
        """A checkpoint asks for the state from a thread of its own, and no draw may be lost between two lines."""
        self._feeder: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._feeder = asyncio.create_task(self._feed(), name="roller")

    async def take(self, step: int) -> Batch:
        started = time.monotonic()
        taken = await self._take(step)
        rolled = time.monotonic()
        batch = await asyncio.to_thread(self._make_batch, taken)
        await self._learn(taken)
        seconds = {"rollout": rolled - started, "credit": time.monotonic() - rolled, **batch.seconds}
        last = max(group.draw for group in (*taken.groups, *(group for group, _ in taken.dropped)))
        self._stream_states = {draw: state for draw, state in self._stream_states.items() if draw > last}
        return Batch(
            updates=batch.updates,
            groups=batch.groups,
            dropped=batch.dropped or taken.dropped,  # credit may drop more, e.g. groups without a pair
            seconds=seconds,
            metrics={**batch.metrics, **self._recent.measure(batch.groups)},
        )

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

    async def _learn(self, taken: StepGroups) -> None:
        """Rewards that learn see what was trained. A judge that fails here is the judge's fault, not the task's."""
        try:
            await asyncio.wait_for(self._evolve(taken), self._settings.step_seconds)
        except TaskError as error:
            raise BackendError(f"a reward could not learn from this step: {error}") from error

    async def _evolve(self, taken: StepGroups) -> None:
        await self._setup.scorer.evolve(sorted(taken.groups, key=lambda group: group.draw))

    def state(self) -> dict[str, Scalar | list[Scalar]]:
        """The task stream as it was before the first draw that is not consumed yet, and the prompts of late."""
        with self._drawing:
            first = min(self._stream_states, default=None)
            stream = self._stream.state() if first is None else self._stream_states[first]
        return {**stream, RECENT: list(self._recent.state())}

    def load_state(self, state: State) -> None:
        recent = state.get(RECENT, [])
        self._recent.load_state([str(line) for line in recent] if isinstance(recent, list) else [])
        self._stream.load_state({name: value for name, value in state.items() if name != RECENT})

    async def close(self) -> None:
        if self._feeder is not None:
            self._feeder.cancel()
            await asyncio.wait([self._feeder], timeout=30.0)

    async def _feed(self) -> None:
        """Starts groups as long as the buffer has room. Ends with the run, or with the first broken backend."""
        async with asyncio.TaskGroup() as groups:
            while True:
                for _ in range(await self._buffer.wait_for_room(LONGEST_STEP_SECONDS)):
                    with self._drawing:
                        before = self._stream.state()
                        draw, task = self._stream.next()
                        self._stream_states[draw] = before
                    await self._buffer.start(draw)
                    groups.create_task(self._roll(draw, task), name=f"group {draw}")

    async def _roll(self, draw: int, task: Task) -> None:
        settings = self._settings
        try:
            group = await run_group(
                self._setup,
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
        await self._buffer.finish(group, reason)

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
        groups = [*taken.groups, *(group for group, _ in taken.dropped)]
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


def _first_cause(error: BaseException | None) -> BaseException:
    """The error inside nested task groups that a user should read."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error or BackendError("the roller ended before the run")
