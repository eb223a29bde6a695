"""Rewards of the user's own: a function named "package.module:function", run in killable workers like every verifier.

Owns: its contract (prompt, response, answer) -> float | None. Refuses: guessing at anything else it returns.
"""

from __future__ import annotations

import inspect

from temper.errors import UserError
from temper.named import load_function
from temper.rewards.workers import WorkerFailed, WorkerPool
from temper.types import Score, Task, Trajectory


class UserReward:
    """Calls the function with the last user message, the response and the gold answer. None is unscorable."""

    def __init__(self, target: str, *, workers: int = 2, deadline_seconds: float = 10.0) -> None:
        require_reward_function(target)
        self.name = target.partition(":")[2]
        self._pool = WorkerPool(target, size=workers, deadline_seconds=deadline_seconds)

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        prompt = next((m.content for m in reversed(task.messages) if m.role == "user"), "")
        try:
            value = await self._pool.call(prompt, trajectory.text, task.answer)
        except WorkerFailed as error:
            return Score.error(str(error))
        if value is None:
            return Score.unscorable("the function returned None")
        if not isinstance(value, (int, float)):
            return Score.error(f"the function returned {value!r:.80}, not a number or None")
        return Score.of(value)

    def check(self, task: Task) -> str | None:
        return None

    async def close(self) -> None:
        self._pool.close()


def require_reward_function(target: str) -> None:
    """Fails now, with the user's own words, rather than at the first score of a run."""
    where = f'reward "{target}"'
    function = load_function(target, where=where)
    try:
        inspect.signature(function).bind("prompt", "response", None)
    except TypeError as error:
        raise UserError(f"{where}: must take (prompt, response, answer), got {inspect.signature(function)}") from error
