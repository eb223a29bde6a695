"""All attempts at one draw of one task.

Owns: running the members and their baseline side by side, and whether the group carries a learning signal.
"""

from __future__ import annotations

import asyncio
import dataclasses

from temper.rollout.episode import EpisodeSetup, run_episode
from temper.rollout.steps import StepSplit, estimate_steps
from temper.types import Group, Task, Trajectory

GREEDY_INDEX = -1
"""Place of the greedy baseline, which is no member."""


async def run_group(
    setup: EpisodeSetup,
    task: Task,
    *,
    draw: int,
    group_size: int,
    prefix: str,
    greedy: bool = False,
    steps: StepSplit | None = None,
) -> Group:
    """Plays `group_size` episodes at once, and a greedy one if asked. Equal prompts are prefilled once by the engine.

    With `steps`, the values of a member's reasoning steps are estimated as soon as it is scored.
    """
    group_id = f"{task.id}#{draw}"
    name = f"{prefix}/{group_id}"
    async with asyncio.TaskGroup() as members:
        running = [
            members.create_task(_member(setup, task, group_id, index, f"{name}/{index}", steps))
            for index in range(group_size)
        ]
        baselines = [members.create_task(_greedy(setup, task, group_id, f"{name}/greedy"))] if greedy else []
    return Group(
        id=group_id,
        draw=draw,
        task=task,
        trajectories=tuple(member.result() for member in running),
        greedy=next((member.result() for member in baselines), None),
    )


def reason_to_drop(group: Group, *, min_members: int, drop_degenerate: bool) -> str | None:
    """Why a finished group is not trained, or None. The reason goes to the ledger."""
    if len(group.trainable) < min_members:
        reasons = [str(t.score.reason) for t in group.trajectories if not t.score.is_value]
        return f"too few scored members: {reasons[0]}" if reasons else "too few scored members"
    if group.greedy is not None and not group.greedy.score.is_value:
        return f"the greedy baseline could not be scored: {group.greedy.score.reason}"
    if drop_degenerate and group.is_degenerate:
        return "degenerate"
    return None


async def _member(
    setup: EpisodeSetup, task: Task, group_id: str, index: int, request_id: str, steps: StepSplit | None
) -> Trajectory:
    trajectory = await run_episode(setup, task, group_id=group_id, index=index, request_id=request_id)
    return trajectory if steps is None else await estimate_steps(setup, task, trajectory, steps, request_id)


async def _greedy(setup: EpisodeSetup, task: Task, group_id: str, request_id: str) -> Trajectory:
    """One attempt at temperature 0. Nobody trains on it, so nobody needs its most likely tokens."""
    params = dataclasses.replace(setup.params, temperature=0.0, top_logprobs=0)
    greedy = dataclasses.replace(setup, params=params)
    return await run_episode(greedy, task, group_id=group_id, index=GREEDY_INDEX, request_id=request_id)
