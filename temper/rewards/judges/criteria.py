"""Rubrics: weighted criteria, each judged by itself.

Owns: kind "rubric", reading criteria, their weighted mean. Refuses: adding up rewards (composite.py); changing
criteria during a run (evolving.py).
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from temper.asking.endpoint import Endpoint
from temper.asking.verdicts import RecordLog
from temper.errors import UserError
from temper.protocols import Reward
from temper.rewards.judges.agreement import LabelledSet
from temper.rewards.judges.judge import (
    Judge,
    JudgeOptions,
    Option,
    control_length,
    identity_of,
    labelled_set,
    read_judge_options,
    settle,
    shown_texts,
)
from temper.rewards.judges.prompts import ITEM, score_prompt
from temper.types import Scalar, Score, ScoreKind, Task, Trajectory


@dataclass(frozen=True, slots=True)
class Item:
    """One criterion. A negative weight is for a fault: meeting it costs."""

    criterion: str
    weight: float = 1.0


def rubric_score(weights: Sequence[float], scores: Sequence[float]) -> float:
    """S = sum w_k s_k / sum |w_k|, s_k in [0, 1], as in open-instruct."""
    total = sum(abs(weight) for weight in weights)
    return sum(weight * score for weight, score in zip(weights, scores, strict=True)) / total


def combine_items(items: Sequence[Item], scores: Sequence[Score]) -> Score:
    """The rubric's score. One item without a score leaves none: the mean of the others is another goal."""
    failed = [(item, score) for item, score in zip(items, scores, strict=True) if score.value is None]
    for item, score in sorted(failed, key=lambda pair: pair[1].kind is not ScoreKind.ERROR):
        return Score(kind=score.kind, reason=f'criterion "{item.criterion:.40}": {score.reason}')
    return Score.of(rubric_score([item.weight for item in items], [score.value or 0.0 for score in scores]))


def read_items(text: str) -> tuple[Item, ...]:
    """Items from JSON: a list of criteria, or of {"criterion": ..., "weight": ...}. ValueError says what is wrong."""
    rows: Any = json.loads(text)
    if not isinstance(rows, list):
        raise ValueError(f"a rubric is a list, not {rows!r:.60}")
    return tuple(_item(row) for row in rows)


def _item(row: Any) -> Item:
    row = {"criterion": row} if isinstance(row, str) else row
    if not isinstance(row, dict) or not set(row) <= {"criterion", "weight"} or "criterion" not in row:
        raise ValueError(f'{row!r:.60} is not {{"criterion": ..., "weight": ...}}')
    return make_item(row["criterion"], row.get("weight", 1.0))


def make_item(criterion: object, weight: object) -> Item:
    if not isinstance(criterion, str) or not criterion.strip():
        raise ValueError(f"criterion {criterion!r:.60} is no text")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight == 0:
        raise ValueError(f"weight {weight!r:.40} must be a number other than 0")
    return Item(criterion.strip(), float(weight))


class RubricSource:
    """Where a task's criteria come from: its extra field "rubric" (JSON), else those of the recipe."""

    def __init__(self, kind: str, items: Sequence[Scalar], weights: Sequence[Scalar]) -> None:
        if isinstance(items, str) or (weights and len(weights) != len(items)):
            raise UserError(f'reward "{kind}": items={items!r:.80} must be a list, with as many weights or none.')
        try:
            self._items = tuple(map(make_item, items, weights or [1.0] * len(items)))
        except ValueError as error:
            raise UserError(f'reward "{kind}": {error}.') from error

    def items(self, task: Task) -> tuple[Item, ...]:
        """ValueError when the task's rubric is malformed."""
        return read_items(str(task.extra["rubric"])) if "rubric" in task.extra else self._items

    def check(self, task: Task) -> str | None:
        try:
            items = self.items(task)
        except ValueError as error:
            return f"its rubric cannot be read: {error}"
        return None if items else 'it has no rubric. Give it a field "rubric", or the reward options.items'


class ItemJudge:
    """Judges one response by each of several criteria."""

    def __init__(self, options: JudgeOptions, endpoint: Endpoint, log: RecordLog) -> None:
        self._options = options
        self._log = log
        self._judge = Judge(score_prompt(options.instructions or ITEM, options.scale), options, endpoint, log)

    @property
    def fingerprint(self) -> str:
        return self._judge.fingerprint

    async def score(
        self, items: Sequence[Item], task: Task, trajectory: Trajectory, **detail: Scalar
    ) -> tuple[Score, list[Score]]:
        """The rubric's score and each item's; all go into the log."""
        texts = shown_texts(task, trajectory, self._options)
        identity = identity_of(trajectory)
        scores = await asyncio.gather(
            *(settle(self._judge.ask({**texts, "criterion": item.criterion}, identity)) for item in items)
        )
        for item, score in zip(items, scores, strict=True):
            self._log.add(
                trajectory, score, criterion=item.criterion, weight=item.weight, fingerprint=self.fingerprint, **detail
            )
        total = control_length(combine_items(items, scores), texts["response"], self._options)
        return self._log.add(trajectory, total, fingerprint=self.fingerprint, **detail), scores


class RubricReward(Reward):
    """The weighted mean of criteria; from -1 to 1 with negative weights, else from 0."""

    name = "rubric"
    log: RecordLog
    labels: LabelledSet

    def __init__(self, *, items: Sequence[Scalar] = (), weights: Sequence[Scalar] = (), **judge: Option) -> None:
        self.options = read_judge_options(self.name, judge)
        self.log = RecordLog()
        self._source = RubricSource(self.name, items, weights)
        self._endpoint = Endpoint(self.options)
        self._judge = ItemJudge(self.options, self._endpoint, self.log)
        self.labels = labelled_set(self, self.options)
        self.fingerprint = self._judge.fingerprint

    async def start(self) -> dict[str, float]:
        """As in JudgeReward."""
        return await self.labels.start()

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        if (reason := self.check(task)) is not None:
            return Score.error(reason)
        total, _ = await self._judge.score(self._source.items(task), task, trajectory)
        return total

    def check(self, task: Task) -> str | None:
        return self._source.check(task)

    async def close(self) -> None:
        await self._endpoint.close()
