"""All attempts at one draw of one task.

Owns: running the members, their opponents and their baseline side by side, playing anew what failed, and whether the
group carries a learning signal.
"""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass

from temper.rollout.drops import DEGENERATE
from temper.rollout.episode import EpisodeSetup, run_episode
from temper.rollout.steps import StepSplit, estimate_steps
from temper.types import TRAINABLE_STATUSES, Event, Group, Status, Task, Trajectory, lasting


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What a group is played with beside its members."""

    greedy: bool = False
    """One more attempt at temperature 0, as a baseline."""
    steps: StepSplit | None = None
    """How answers are cut into steps whose values are estimated; None: not at all."""
    retries: int = 0
    """How often an attempt whose environment failed is played anew."""
    opponent: EpisodeSetup | None = None
    """Who plays the second half of the members. None: the policy plays them all."""


NOTHING = Extras()
GREEDY_INDEX = -1
"""Place of the greedy baseline, which is not a member."""


async def run_group(
    setup: EpisodeSetup,
    task: Task,
    *,
    draw: int,
    group_size: int,
    prefix: str,
    extras: Extras = NOTHING,
) -> Group:
    """Plays `group_size` episodes at once, and a greedy one if asked. Equal prompts are prefilled once by the engine.

    Values of a member's reasoning steps are estimated as soon as it is scored. With an opponent the first half is the
    policy's and the second half the opponent's, whose random numbers nobody else draws.
    """
    assert extras.opponent is None or group_size % 2 == 0, "each side plays one half"
    num_own = group_size if extras.opponent is None else group_size // 2
    group_id = f"{task.id}#{draw}"
    name = f"{prefix}/{group_id}"
    async with asyncio.TaskGroup() as members:
        running = [
            members.create_task(_member(setup, task, group_id, index, f"{name}/{index}", extras))
            for index in range(num_own)
        ]
        if extras.opponent is not None:
            running += [
                members.create_task(_opponent(extras, task, group_id, index, f"{name}/opponent {index}"))
                for index in range(num_own, group_size)
            ]
        played = [_greedy(setup, task, group_id, f"{name}/greedy", extras.retries)] if extras.greedy else []
        baselines = [members.create_task(one) for one in played]
    trajectories = [member.result() for member in running]
    greedy = next((member.result() for member in baselines), None)
    if greedy is not None:  # which is not recorded: what it did to the world stands with the first member
        done = (*trajectories[0].unplaced_events, *lasting(greedy.events, "the greedy baseline"))
        trajectories[0] = dataclasses.replace(trajectories[0], unplaced_events=done)
    return Group(id=group_id, draw=draw, task=task, trajectories=tuple(trajectories), greedy=greedy)


def reason_to_drop(group: Group, *, min_members: int, drop_degenerate: bool) -> str | None:
    """Why a finished group is not trained, or None. The reason goes to the ledger."""
    # A group of opponents alone has enough scores and nothing to train.
    if len(group.trainable) < min_members or all(member.is_opponents for member in group.trainable):
        reasons = [str(t.score.reason) for t in group.trajectories if not t.score.is_value]
        return f"too few scored members: {reasons[0]}" if reasons else "too few scored members"
    if group.greedy is not None and not group.greedy.score.is_value:
        return f"the greedy baseline could not be scored: {group.greedy.score.reason}"
    if drop_degenerate and group.is_degenerate:
        return DEGENERATE
    return None


async def _member(
    setup: EpisodeSetup, task: Task, group_id: str, index: int, request_id: str, extras: Extras
) -> Trajectory:
    trajectory = await play_attempt(setup, task, group_id, index, request_id, retries=extras.retries)
    if extras.steps is None:
        return trajectory
    return await estimate_steps(setup, task, trajectory, extras.steps, request_id)


async def _opponent(extras: Extras, task: Task, group_id: str, index: int, request_id: str) -> Trajectory:
    """An attempt that must not pass for one of the policy."""
    assert extras.opponent is not None, "somebody has to play"
    trajectory = await play_attempt(extras.opponent, task, group_id, index, request_id, retries=extras.retries)
    assert trajectory.is_opponents or not trajectory.num_tokens, "what an opponent draws has no version of the policy"
    return trajectory


async def play_attempt(
    setup: EpisodeSetup, task: Task, group_id: str, index: int, request_id: str, *, retries: int
) -> Trajectory:
    """Played anew when the environment failed, as often as allowed. What failed is neither trained nor a score; what it
    did to the world stays done, and is recorded with the attempt that replaces it."""
    trajectory = await run_episode(setup, task, group_id=group_id, index=index, request_id=request_id)
    done: tuple[Event, ...] = ()
    for retry in range(1, retries + 1):
        if not may_play_anew(trajectory):
            break
        done += lasting(trajectory.events, f"attempt {retry}, which failed")
        again = f"{request_id}/retry {retry}"
        trajectory = await run_episode(setup, task, group_id=group_id, index=index, request_id=again)
    return dataclasses.replace(trajectory, unplaced_events=(*done, *trajectory.unplaced_events))


def may_play_anew(trajectory: Trajectory) -> bool:
    """Whether an attempt came to no end, and another might. A prompt that is too long would be as long again."""
    return trajectory.status not in (*TRAINABLE_STATUSES, Status.TOO_LONG)


async def _greedy(setup: EpisodeSetup, task: Task, group_id: str, request_id: str, retries: int) -> Trajectory:
    """One attempt at temperature 0."""
    greedy = dataclasses.replace(setup, params=setup.params.greedy())
    return await play_attempt(greedy, task, group_id, GREEDY_INDEX, request_id, retries=retries)
