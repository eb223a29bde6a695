"""Recorded groups as a source of batches: what was drawn and judged before, in the order of the task stream.

Owns: filling a step with groups, and how far the records have been gone through. Refuses: which records are fit
(reading/recorded.py), credit (its stage's own), drawing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from temper.config import RunConfig
from temper.errors import BackendError, UserError
from temper.objectives import DirectLoss, Objective
from temper.rollout.buffer import StepGroups
from temper.rollout.drops import explain_drops
from temper.rollout.group import reason_to_drop
from temper.stages.reading.stream import StreamSource
from temper.tasks.dataset import Stream
from temper.types import Batch, Group, Task, Trajectory

NOT_RECORDED = {
    "greedy": "one more attempt at temperature 0",
    "step_values": "rollouts from inside an answer",
    "sampler_top_k": "the likeliest tokens at every place",
}
"""What objectives may need that only a sampler can give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSettings:
    groups_per_step: int
    min_members: int
    drop_degenerate: bool
    max_rounds: int
    """Gives up when this many times groups_per_step were dropped for one step."""


class RecordedGroups(StreamSource):
    """Implements protocols.BatchSource."""

    def __init__(
        self,
        stream: Stream,
        members: Mapping[str, tuple[Trajectory, ...]],
        settings: RecordedSettings,
        credit: Callable[[StepGroups], Batch],
    ) -> None:
        """members: attempts at each task of the stream, by its id."""
        super().__init__(stream)
        self._members, self._settings, self._credit = members, settings, credit
        self._num_prompts = sum(source.size or 0 for source in stream.sources)

    async def take(self, step: int) -> Batch:
        started = time.monotonic()
        taken = self._taken(step)
        batch = await asyncio.to_thread(self._credit, taken)
        passes = (max(group.draw for group in taken.everything) + 1) / self._num_prompts
        return replace(
            batch,
            dropped=batch.dropped or taken.dropped,
            seconds={"data": time.monotonic() - started, **batch.seconds},
            metrics={**batch.metrics, "data/passes": passes},
        )

    def _taken(self, step: int) -> StepGroups:
        settings = self._settings
        groups, dropped = list[Group](), list[tuple[Group, str]]()
        while len(groups) < settings.groups_per_step:
            group = self._group(*self._stream.next())
            reason = reason_to_drop(group, min_members=settings.min_members, drop_degenerate=settings.drop_degenerate)
            if reason is None:
                groups.append(group)
                continue
            dropped.append((group, reason))
            if len(dropped) > settings.max_rounds * settings.groups_per_step:
                raise BackendError(
                    f"step {step}: {len(dropped)} recorded groups were dropped and {len(groups)} of "
                    f"{settings.groups_per_step} found. {explain_drops(dropped)}"
                )
        return StepGroups(groups=tuple(groups), dropped=tuple(dropped))

    def _group(self, draw: int, task: Task) -> Group:
        """Named by its draw, as one that is played: a prompt that comes back is another group."""
        name = f"{task.id}#{draw}"
        members = tuple(
            replace(member, task_id=task.id, group_id=name, index=index)
            for index, member in enumerate(self._members[task.id])
        )
        return Group(id=name, draw=draw, task=task, trajectories=members)


def check_recorded(config: RunConfig, objective: Objective) -> None:
    """Raises UserError for what cannot be done without drawing, in a stage that trains on records."""
    rollout = config.rollout
    for need, what in NOT_RECORDED.items():
        if need in objective.needs:
            raise UserError(
                f"objective {objective.name} needs {what}, which records have not. Use another preset, e.g. grpo"
            )
    if isinstance(objective, DirectLoss) and objective.loss.opponent_share is not None:
        raise UserError(f"objective {objective.name} draws opponents, and records have none. Use e.g. dpo")
    if rollout.max_staleness or rollout.controls:
        key = "max_staleness" if rollout.max_staleness else "controls"
        raise UserError(
            f"rollout.{key} is about drawing, and a stage that trains on records draws nothing. Leave it out"
        )
    if config.data.choose:
        raise UserError("data.choose chooses what is drawn next, and records are drawn already. Leave it out")
