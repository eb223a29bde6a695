"""The reward for mathematical answers.

Owns: kind "math". Refuses: running math-verify in this process; sympy can hang for ever on one hostile answer.
"""

from __future__ import annotations

import importlib.util

from temper.errors import UserError
from temper.rewards.answers import equal_plain, find_answer, gold_answer
from temper.rewards.workers import WorkerFailed, WorkerPool
from temper.types import Score, Task, Trajectory


class MathReward:
    r"""1 when the final answer equals the gold answer, else 0.

    Plain numbers are compared here, everything else by math-verify in a worker. The final answer is the last
    \boxed{...}, else what follows "####", else the last number. A response without one is wrong (0), not an error.
    """

    name = "math"

    def __init__(self, *, require_boxed: bool = False, workers: int = 2, deadline_seconds: float = 5.0) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise UserError('reward "math" needs the package math-verify. Run: pip install "temper-rl[math]"')
        self._require_boxed = require_boxed
        self._pool = WorkerPool("temper.rewards.math_worker:verify", size=workers, deadline_seconds=deadline_seconds)

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        if task.answer is None:
            return Score.error("the task has no gold answer")
        answer = find_answer(trajectory.text, require_boxed=self._require_boxed)
        if answer is None:
            return Score.of(0.0)
        gold = gold_answer(task.answer)
        if (is_equal := equal_plain(gold, answer)) is not None:
            return Score.of(float(is_equal))
        try:
            verdict = await self._pool.call(gold, answer)
        except WorkerFailed as error:
            return Score.error(str(error))
        return Score.error("the gold answer cannot be parsed") if verdict is None else Score.of(float(verdict))

    def check(self, task: Task) -> str | None:
        """A gold answer must be understood and equal to itself; otherwise no response could ever be right."""
        if task.answer is None:
            return "it has no gold answer"
        gold = gold_answer(task.answer)
        if equal_plain(gold, gold):
            return None
        try:
            verdict = self._pool.submit(gold, gold).result(timeout=300.0)
        except WorkerFailed as error:
            return f"its answer {task.answer!r} breaks math-verify: {error}"
        return None if verdict else f"its answer {task.answer!r} cannot be parsed as mathematics"

    async def close(self) -> None:
        self._pool.close()
