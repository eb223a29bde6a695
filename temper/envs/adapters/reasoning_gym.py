"""Procedural tasks from the package reasoning-gym, and the reward that asks its own verifiers.

Owns: generators "reasoning_gym" and "reasoning_gym_mix", reward "reasoning_gym". Refuses: a pool of its own; data.py
passes in the one of rewards.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import re
import warnings
from collections.abc import Callable
from typing import Any, Protocol

from temper.errors import TaskError, UserError, did_you_mean, install_line
from temper.protocols import Reward
from temper.types import Message, Scalar, Score, Task, Trajectory

HASH_DEPENDENT = frozenset(
    ("codeio", "isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")
)
"""Families that walk a Python set: another process, another item, unless PYTHONHASHSEED is fixed."""
NO_LEVEL = -1
"""Stands for the family's defaults."""
# Or the end: else every tag that is never closed would be followed to the end of the text, again and again.
_ANSWER = re.compile(r"<answer>(.*?)(</answer>|\Z)", flags=re.DOTALL)


def reasoning_gym(
    index: int, seed: int, *, family: str, curriculum: int = NO_LEVEL, **options: Scalar | list[Scalar]
) -> Task:
    """Item `index` of a family, e.g. family "chain_sum" with min_terms 2, max_terms 2, and so on.

    curriculum: level of the family's own curriculum, from 0; a level beyond its last is its last. Options given by name
    come before those of the level.
    """
    _require_family(family, options)
    if curriculum != NO_LEVEL:
        options = {**_level_options(family, curriculum), **options}
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


def reasoning_gym_mix(
    index: int,
    seed: int,
    *,
    families: list[str],
    weights: list[float] | None = None,
    first_level: int = NO_LEVEL,
    last_level: int = NO_LEVEL,
    level_every: int = 0,
) -> Task:
    """Item `index` of a mixture: a family drawn by weight, at the level that the index has reached.

    The level rises by one every `level_every` items, from first_level to last_level; level_every 0 stays at the first.
    No first_level: the families' defaults. Families without a curriculum keep their defaults at every level.
    """
    shares = [1.0] * len(families) if weights is None else weights
    if not families or len(shares) != len(families) or not all(0 < share < math.inf for share in shares):
        raise UserError(f"families={families} and weights={weights} must be of one length, and weights more than 0.")
    if level_every < 0 or first_level < NO_LEVEL or (level_every and first_level == NO_LEVEL):
        raise UserError(
            f"level_every={level_every} with first_level={first_level}: a schedule needs both, and of at least 0."
        )
    level = first_level + (index // level_every if level_every else 0)
    if last_level != NO_LEVEL:
        level = min(level, last_level)
    for name in families:  # all of them now: a misspelt rare one must not wait for its turn
        _require_family(name, {})
    family = random.Random(f"reasoning_gym_mix/{seed}/{index}").choices(families, shares)[0]
    has_levels = level != NO_LEVEL and _has_curriculum(family)
    return reasoning_gym(index, seed, family=family, curriculum=level if has_levels else NO_LEVEL)


def _has_curriculum(family: str) -> bool:
    from reasoning_gym.factory import has_curriculum

    return bool(has_curriculum(family))


def _level_options(family: str, level: int) -> dict[str, Scalar | list[Scalar]]:
    """The options that differ between this level of the family's curriculum and the family's defaults."""
    from reasoning_gym.factory import create_curriculum

    if level < 0:
        raise UserError(f"curriculum={level} must be a level from 0.")
    if not _has_curriculum(family):
        raise UserError(f'family "{family}" has no curriculum. Set its options by name.')
    curriculum = create_curriculum(family)
    curriculum.set_global_level(level)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reasoning-gym warns where a level has only one value
        config = curriculum.generate_configuration()
    names = {name for attribute in curriculum.attributes.values() for name in _fields_of(attribute)}
    return {name: _plain(getattr(config, name)) for name in sorted(names)}


def _fields_of(attribute: Any) -> tuple[str, ...]:
    """The options that one attribute of a curriculum sets: a range sets two."""
    if hasattr(attribute, "field_name"):
        return (attribute.field_name,)
    return (attribute.lower_field_name, attribute.upper_field_name)


def _plain(value: Any) -> Any:
    """As JSON gives it back: equal options must be equal text."""
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _require_family(family: str, options: dict[str, Scalar | list[Scalar]]) -> None:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(
            f'generator "reasoning_gym" needs the package reasoning-gym. Run: {install_line("gym")}'
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


class ReasoningGymReward(Reward):
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
    if tagged := [inner for inner, end in _ANSWER.findall(text) if end]:
        return str(tagged[-1]).strip()
    if gold is None or "\n" in gold.strip():
        return text
    return text.splitlines()[-1].strip()
