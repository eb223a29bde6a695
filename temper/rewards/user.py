"""Rewards of the user's own: a function named "package.module:function" or "file.py:function", run in killable workers
like every verifier, or one that was handed over in Python, run in threads of this process.

Owns: its contract, (prompt, response, answer) -> float | None, and by turn (prompt, turns, answer) -> list of these;
further parameters are columns of the task's row. Refuses: guessing at anything else it returns.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from temper.errors import UserError, did_you_mean
from temper.plugins import given_function, load_function
from temper.protocols import Reward
from temper.rewards.workers.live import Calls, LiveCalls
from temper.rewards.workers.pool import WorkerFailed, WorkerPool
from temper.terminal import SafeConsole
from temper.types import Score, Task, Trajectory

SHOWN_LINES = 20
"""Of what a function prints: enough to debug it in a dry run, too few to bury a training."""
LISTS = ("prompts", "completions")
"""Parameters of rewards that judge a whole batch at once, as TRL calls them."""


class UserReward(Reward):
    """Calls the function with the last user message, the response and the gold answer, and with those columns of the
    row that it has parameters for. None is unscorable.

    by_turn: it is shown all turns in place of the response (shown_turns) and pays each of them, None for nothing.
    """

    def __init__(self, target: str, *, by_turn: bool = False, workers: int = 2, deadline_seconds: float = 10.0) -> None:
        function, self._where = require_reward_function(target, "turns" if by_turn else "response")
        self._columns = columns_of(function)
        self.name = target.partition(":")[2]
        self.pays_turns = by_turn
        given = given_function(target)
        self._pool: Calls = (
            WorkerPool(target, size=workers, deadline_seconds=deadline_seconds, show=Printed(self.name))
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
            value = await self._pool.call(prompt, said, task.answer, **self._columns.choose(row_of(task)))
        except WorkerFailed as error:
            reason = str(error)  # an exception names its own line; a time-out and a dead process do not
            return Score.error(reason if ", line " in reason else f"{reason}{self._where}")
        return Score.unscorable(f"the function returned None{self._where}") if value is None else value

    def check(self, task: Task) -> str | None:
        """Refuses a task whose row lacks a column that the function cannot do without."""
        row = row_of(task)
        missing = [name for name in self._columns.required if name not in row]
        if not missing:
            return None
        near = did_you_mean(missing[0], row)
        return (
            f'its function has a parameter "{missing[0]}", which is no column of the row.{near} Columns: '
            f"{', '.join(row) or 'none'}. Give the parameter a default where it may be absent{self._where}"
        )

    async def close(self) -> None:
        self._pool.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which columns of a row a function wants beside prompt, response and answer."""

    named: tuple[str, ...]
    required: tuple[str, ...]
    """Those of them without a default."""
    takes_all: bool
    """It has **columns."""

    def choose(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in row.items() if self.takes_all or name in self.named}


def columns_of(function: Callable[..., Any]) -> Columns:
    """From its signature: everything behind the first three parameters."""
    parameters = list(inspect.signature(function).parameters.values())
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first = [parameter for parameter in parameters if parameter.kind in by_place][:3]
    rest = [parameter for parameter in parameters if parameter not in first]
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [parameter for parameter in rest if parameter.kind in by_name]
    return Columns(
        named=tuple(parameter.name for parameter in named),
        required=tuple(parameter.name for parameter in named if parameter.default is parameter.empty),
        takes_all=any(parameter.kind is parameter.VAR_KEYWORD for parameter in rest),
    )


def row_of(task: Task) -> dict[str, Any]:
    """All columns of a task's row by name, but those that a function gets by place."""
    every = {**task.columns, **task.extra}
    return {name: value for name, value in every.items() if name not in ("prompt", "response", "turns", "answer")}


class Printed:
    """Shows what a function prints in its worker, up to SHOWN_LINES lines. Called from the pool's threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._left = SHOWN_LINES
        self._lock = threading.Lock()

    def __call__(self, text: str) -> None:
        with self._lock:
            lines = text.splitlines()[: self._left]
            self._left -= len(lines)
            if not lines:
                return
            last = [] if self._left else [f"{self._name} prints more; the rest is not shown"]
            shown = "\n".join([*(f"{self._name} prints: {line}" for line in lines), *last])
            SafeConsole(stderr=True, soft_wrap=True).print(shown, highlight=False)


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


def require_reward_function(target: str, shown: str = "response") -> tuple[Callable[..., Any], str]:
    """Fails now, with the user's own words, rather than at the first score of a run.

    Returns the function, and where it is defined, to be put behind what it did: ", in rewards.py, line 3".
    """
    where = f'reward "{target}"'
    function = load_function(target, where=where)
    signature = inspect.signature(function)
    if lists := [name for name in LISTS if name in signature.parameters]:
        raise UserError(
            f"{where}: takes {signature}, a whole batch, as TRL calls it. Here a reward judges one answer: "
            f"def {target.rpartition(':')[2]}(prompt, {shown}, answer, **columns) -> number or None. Rename {lists[0]} "
            "and return one number in place of a list"
        )
    columns = columns_of(function)
    try:
        signature.bind("prompt", shown, None, **dict.fromkeys(columns.required))
    except TypeError as error:
        raise UserError(
            f"{where}: must take (prompt, {shown}, answer), and may have further parameters named like columns of a "
            f"row, or **columns; got {signature}"
        ) from error
    code = getattr(inspect.unwrap(function), "__code__", None)
    return function, f", in {target}" if code is None else f", in {code.co_filename}, line {code.co_firstlineno}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)
