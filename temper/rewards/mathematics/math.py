"""The reward for mathematical answers.

Owns: kind "math". Refuses: running sympy in this process; it can hang for ever on one hostile answer.
"""

from __future__ import annotations

import importlib.util

from temper.errors import UserError, install_line
from temper.protocols import Reward
from temper.rewards.mathematics.answers import count_words, find_answers, gold_answer
from temper.rewards.mathematics.forms import decide, form, is_refused, plain_number
from temper.rewards.mathematics.second_opinion import second_opinion as ask_second
from temper.rewards.workers.pool import WorkerFailed, WorkerPool, blame
from temper.types import Score, Task, Trajectory

MAX_ANSWERS = 3
"""One answer may be written in a few ways. More is spam, and not worth a worker's time."""
MEMORY_BYTES = 4 * 2**30
"""Limit of a worker's address space; with sympy loaded it takes less than a quarter of this."""


class MathReward(Reward):
    r"""1 when the final answer equals the gold answer, else 0. The rules of writing are in docs/rewards.md.

    Plain numbers are compared here, everything else in a worker (checking.py). A response that states no answer, or
    several different ones, is wrong (0), not an error. With second_opinion a verdict that the second checker
    contradicts is unscorable.
    """

    name = "math"

    def __init__(
        self,
        *,
        strict: bool = False,
        require_boxed: bool = False,
        min_words: int = 0,
        second_opinion: bool = False,
        workers: int = 2,
        deadline_seconds: float = 5.0,
    ) -> None:
        """strict: the last number of a response is not an answer. min_words: a response with fewer
        words beside its answer is wrong."""
        if importlib.util.find_spec("math_verify") is None:
            raise UserError(f'reward "math" needs the package math-verify. Run: {install_line("math")}')
        self._is_strict = strict
        self._require_boxed = require_boxed
        self._min_words = min_words
        self._has_second_opinion = second_opinion
        self._pool = WorkerPool(
            "temper.rewards.mathematics.checking:verify",
            size=workers,
            deadline_seconds=deadline_seconds,
            is_pure=True,
            memory_bytes=MEMORY_BYTES,
        )

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        if task.answer is None:
            return Score.error("the task has no gold answer")
        text = trajectory.text
        answers = find_answers(text, is_strict=self._is_strict, require_boxed=self._require_boxed)
        if not 1 <= len(answers) <= MAX_ANSWERS:
            return Score.of(0.0)
        if self._min_words and count_words(text, answers) < self._min_words:
            return Score.of(0.0)
        gold = gold_answer(task.answer)
        for answer in answers:
            score = await self._judge(gold, answer)
            if score != Score.of(1.0):
                return score
        return Score.of(1.0)

    async def _judge(self, gold: str, answer: str) -> Score:
        if not answer or is_refused(answer):
            return Score.of(0.0)
        verdict: bool | str | None = decide(gold, answer)
        if verdict is None:
            try:
                verdict = await self._pool.call(gold, answer)
            except WorkerFailed as error:
                return blame(error)
        if verdict is None:
            return Score.error("the gold answer cannot be parsed")
        if isinstance(verdict, str):
            return Score.of(0.0, verdict)
        if self._has_second_opinion and ask_second(gold, answer) is (not verdict):
            return Score.unscorable(f"the second opinion contradicts: equal is {verdict} by the first")
        return Score.of(float(verdict))

    def check(self, task: Task) -> str | None:
        """A gold answer must be understood and equal to itself; otherwise no response could ever be right."""
        if task.answer is None:
            return "it has no gold answer"
        gold = gold_answer(task.answer)
        if is_refused(gold):
            return f"its answer {task.answer!r} is written in a way that is refused in responses"
        if plain_number(form(gold).text) is not None:
            return None
        try:
            verdict = self._pool.submit(gold, gold).result(timeout=300.0)
        except WorkerFailed as error:
            return f"its answer {task.answer!r} breaks the verifier: {error}"
        if verdict is True:
            return None
        marked = ' Its answer stands behind "####": set answer_pattern = "#### (.+)"' if "####" in task.answer else ""
        return f"its answer {task.answer!r} cannot be parsed as mathematics.{marked}"

    async def close(self) -> None:
        self._pool.close()
