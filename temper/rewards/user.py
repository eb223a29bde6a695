"""Rewards of the user's own: a function named "package.module:function" or "file.py:function", run in killable workers
like every verifier, or one that was handed over in Python, run in threads of this process.

Owns: its contract, (prompt, response, answer) -> float | None, and by turn (prompt, turns, answer) -> list of these.
Refuses: guessing at anything else it returns.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

from temper.errors import UserError
from temper.plugins import given_function, load_function
from temper.protocols import Reward
from temper.rewards.workers.live import Calls, LiveCalls
from temper.rewards.workers.pool import WorkerFailed, WorkerPool
from temper.types import Score, Task, Trajectory


class UserReward(Reward):
    """Calls the function with the last user message, the response and the gold answer. None is unscorable.

    by_turn: it is shown all turns in place of the response (shown_turns) and pays each of them, None for nothing.
    """

    def __init__(self, target: str, *, by_turn: bool = False, workers: int = 2, deadline_seconds: float = 10.0) -> None:
        self._where = require_reward_function(target, "turns" if by_turn else "response")
        self.name = target.partition(":")[2]
        self.pays_turns = by_turn
        given = given_function(target)
        self._pool: Calls = (
            WorkerPool(target, size=workers, deadline_seconds=deadline_seconds)
            if given is None
            else LiveCalls(given, deadline_seconds=deadline_seconds)
        )

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        if self.pays_turns:
            return (await self.score_turns(task, trajectory))[0]
        value = await self._ask(task, trajectory.text)
        if isinstance(value, Score):
            return value
        if not _is_number(value):
            hint = ". To pay turns, set options.by_turn = true" if isinstance(value, list) else ""
            return Score.error(f"the function returned {value!r:.80}, not a number or None{self._where}{hint}")
        if not math.isfinite(value):
            return Score.error(f"the reward is {value}{self._where}")
        return Score.of(value)

    async def score_turns(self, task: Task, trajectory: Trajectory) -> tuple[Score, Sequence[float | None]]:
        """See protocols.Reward. The score is the sum of the payments; composite.py checks their number."""
        paid = await self._ask(task, shown_turns(trajectory))
        if isinstance(paid, Score):
            return paid, []
        if not isinstance(paid, list):
            wanted = f"not a list with a payment for each turn{self._where}"
            return Score.error(f"the function returned {paid!r:.80}, {wanted}"), []
        for turn, payment in enumerate(paid):
            if not (payment is None or _is_number(payment)):
                wanted = f"not a number or None{self._where}"
                return Score.error(f"the function pays turn {turn} {payment!r:.80}, {wanted}"), []
        return Score.of(sum(payment or 0.0 for payment in paid)), paid

    async def _ask(self, task: Task, said: str | list[dict[str, Any]]) -> Any:
        """What the function returned, or a Score when it returned nothing or failed."""
        prompt = next((m.content for m in reversed(task.messages) if m.role == "user"), "")
        try:
            value = await self._pool.call(prompt, said, task.answer)
        except WorkerFailed as error:
            reason = str(error)  # an exception names its own line; a time-out and a dead process do not
            return Score.error(reason if ", line " in reason else f"{reason}{self._where}")
        return Score.unscorable(f"the function returned None{self._where}") if value is None else value

    async def close(self) -> None:
        self._pool.close()


def shown_turns(trajectory: Trajectory) -> list[dict[str, Any]]:
    """What a function that pays turns is shown of each: what the policy said, what the environment replied and paid."""
    return [
        {
            "response": turn.message.content,
            "replies": [reply.as_dict() for reply in turn.replies],
            "reward": turn.reward,
        }
        for turn in trajectory.turns
    ]


def require_reward_function(target: str, shown: str = "response") -> str:
    """Fails now, with the user's own words, rather than at the first score of a run.

    Returns where the function is defined, to be put behind what it did: ", in rewards.py, line 3".
    """
    where = f'reward "{target}"'
    function = load_function(target, where=where)
    try:
        inspect.signature(function).bind("prompt", shown, None)
    except TypeError as error:
        raise UserError(f"{where}: must take (prompt, {shown}, answer), got {inspect.signature(function)}") from error
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f", in {target}" if code is None else f", in {code.co_filename}, line {code.co_firstlineno}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)
