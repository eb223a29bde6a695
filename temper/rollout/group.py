"""All attempts at one draw of one task.

Owns: running the members side by side and whether the group carries a learning signal.
"""

from __future__ import annotations

import asyncio

from temper.rollout.episode import EpisodeSetup, run_episode
from temper.types import Group, Task


async def run_group(setup: EpisodeSetup, task: Task, *, draw: int, group_size: int, prefix: str) -> Group:
    """Plays `group_size` episodes at once. Equal prompts are prefilled once by the engine."""
    group_id = f"{task.id}#{draw}"
    async with asyncio.TaskGroup() as members:
        running = [
            members.create_task(
                run_episode(setup, task, group_id=group_id, index=index, request_id=f"{prefix}/{group_id}/{index}")
            )
            for index in range(group_size)
        ]
    return Group(id=group_id, draw=draw, task=task, trajectories=tuple(member.result() for member in running))


def reason_to_drop(group: Group, *, min_members: int, drop_degenerate: bool) -> str | None:
    """Why a finished group is not trained, or None. The reason goes to the ledger."""
    if len(group.trainable) < min_members:
        reasons = [str(t.score.reason) for t in group.trajectories if not t.score.is_value]
        return f"too few scored members: {reasons[0]}" if reasons else "too few scored members"
    if drop_degenerate and group.is_degenerate:
        return "degenerate"
    return None
