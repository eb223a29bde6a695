"""The reward that the environment itself gave.

Owns: kind "env". Refuses: judging; the environment has looked at its own state.
"""

from __future__ import annotations

from temper.protocols import Reward
from temper.types import Score, Task, Trajectory


class EnvReward(Reward):
    """The sum of what the environment paid over the turns. Unscorable when an episode that ended was paid nothing."""

    name = "env"

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        paid = [turn.reward for turn in trajectory.turns if turn.reward is not None]
        if not paid and trajectory.is_truncated:
            return Score.of(0.0)  # cut before the environment could judge: the goal was not reached
        return Score.of(sum(paid)) if paid else Score.unscorable("the environment gave no reward")
