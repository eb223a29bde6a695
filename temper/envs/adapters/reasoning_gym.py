"""Procedural tasks from the package reasoning-gym, and the reward that asks its own verifiers.

Owns: generator and reward "reasoning_gym". Refuses: a pool of its own; build.py passes in the one of rewards.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from typing import Any, Protocol

from temper.errors import TaskError, UserError, did_you_mean
from temper.types import Message, Scalar, Score, Task, Trajectory

HASH_DEPENDENT = frozenset(
    ("codeio", "isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")
)
"""Families that walk a Python set: another process, another item, unless PYTHONHASHSEED is fixed."""
_ANSWER = re.compile(r"<answer>(.*?)</answer>", flags=re.DOTALL)


def reasoning_gym(index: int, seed: int, *, family: str, **options: Scalar | list[Scalar]) -> Task:
    """Item `index` of a family, e.g. family "chain_sum" with min_terms 2, max_terms 2, and so on."""
    _require_family(family, options)
    from temper.envs.adapters.reasoning_gym_items import ITEMS_PER_SEED, item

    if seed < 0 or not 0 <= index < ITEMS_PER_SEED:
        raise UserError(f"seed={seed} must be at least 0, and at most {ITEMS_PER_SEED:,} items are drawn.")
    text = json.dumps(options, sort_keys=True)
    try:
        entry = item(family, text, seed, index)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"reasoning-gym refuses family {family!r} with options {text}, seed {seed}: {error}") from error
    return Task(
        id=f"{family}:{seed}:{index}",
        messages=(Message(role="user", content=entry["question"]),),
        answer=None if entry["answer"] is None else str(entry["answer"]),
        extra={"family": family, "options": text, "seed": seed, "index": index},
    )


def _require_family(family: str, options: dict[str, Scalar | list[Scalar]]) -> None:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(
            'generator "reasoning_gym" needs the package reasoning-gym. Run: pip install "temper-rl[gym]"'
        ) from error
    if family not in DATASETS:
        raise UserError(
            f'family "{family}" is unknown.{did_you_mean(family, DATASETS)} reasoning-gym has {len(DATASETS)}.'
        )
    if family in HASH_DEPENDENT and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise UserError(
            f'family "{family}" makes other items in every process. Set PYTHONHASHSEED=0 in the environment.'
        )
    known = {field.name for field in dataclasses.fields(DATASETS[family][1])} - {"seed", "size"}
    for name in options:
        if name not in known:
            raise UserError(
                f'option "{name}" is unknown.{did_you_mean(name, known)} Known: {", ".join(sorted(known))}.'
            )


class Pool(Protocol):
    """The part of rewards.workers.WorkerPool used here. Failed calls raise TaskError."""

    async def call(self, *arguments: Any) -> Any: ...

    def close(self) -> None: ...


class ReasoningGymReward:
    """The family's own score, from 0 to 1, some with partial credit.

    strict: the whole response is the answer. Otherwise it is what the last <answer></answer> holds, or the last line.
    """

    name = "reasoning_gym"

    def __init__(
        self, make_pool: Callable[..., Pool], *, strict: bool = False, workers: int = 2, deadline_seconds: float = 10.0
    ) -> None:
        target = "temper.envs.adapters.reasoning_gym_items:score"
        self._pool = make_pool(target, size=workers, deadline_seconds=deadline_seconds)
        self._strict = strict

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        answer = final_answer(trajectory.text, task.answer, strict=self._strict)
        try:
            return Score.of(await self._pool.call(*_item_of(task), task.messages[-1].content, answer))
        except TaskError as error:
            return Score.error(str(error))

    def check(self, task: Task) -> str | None:
        missing = {"family", "options", "seed", "index"} - set(task.extra)
        return (
            f"it does not come from the generator reasoning_gym (no {', '.join(sorted(missing))})" if missing else None
        )

    async def close(self) -> None:
        self._pool.close()


def _item_of(task: Task) -> tuple[Scalar, ...]:
    return tuple(task.extra[key] for key in ("family", "options", "seed", "index"))


def final_answer(response: str, gold: str | None, *, strict: bool) -> str:
    """The part of the response to judge. Where the gold answer has several lines, so may the response."""
    text = response.strip()
    if strict or not text:
        return text
    if tagged := _ANSWER.findall(text):
        return str(tagged[-1]).strip()
    if gold is None or "\n" in gold.strip():
        return text
    return text.splitlines()[-1].strip()
