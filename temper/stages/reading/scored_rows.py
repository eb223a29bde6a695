"""Rows that a scalar head is read on: pairs, and solutions with labelled steps.

Owns: how both are encoded: as learned/model.py and learned/process.py encode what they judge. Refuses: batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from temper.errors import UserError
from temper.objectives import Loss
from temper.objectives.losses.scores import CHOSEN, REJECTED
from temper.rewards.learned.model import encode, encode_chat, spell_out
from temper.stages.reading.examples import require_length
from temper.types import Message, Sample, Task

LABELS = {"1": 1.0, "0": 0.0}

RowMaker = Callable[[Task], list[Sample]]
"""The rows of one task, without their weights."""


def scored_rows(loss: Loss, tokenizer: Any, max_length: int) -> RowMaker:
    """What makes the rows that a loss of scores reads."""
    if loss.reads == "steps":
        return StepRows(tokenizer, separator=loss.argument("separator"), max_length=max_length)
    return PairRows(tokenizer, max_length=max_length)


class PairRows:
    """A pair as two rows, chosen and rejected, each read at its last token. Its margin stands in the chosen row."""

    def __init__(self, tokenizer: Any, *, max_length: int) -> None:
        if not tokenizer.chat_template:
            raise UserError("the tokenizer has no chat template, so a conversation has no form to be scored in.")
        self._tokenizer = tokenizer
        self._max_length = max_length

    def __call__(self, task: Task) -> list[Sample]:
        chosen, rejected = task.answer, task.extra.get("rejected")
        if chosen is None or not isinstance(rejected, str):
            raise UserError(f"task {task.id} is no pair: a reward model needs a chosen and a rejected answer")
        margin = float(task.extra.get("margin", 0.0))
        rows = [self._row(task, 0, chosen, CHOSEN, margin), self._row(task, 1, rejected, REJECTED, 0.0)]
        if rows[0].token_ids == rows[1].token_ids:
            raise UserError(f"task {task.id}: both sides of the pair are {chosen!r:.60}. Remove it: it prefers nothing")
        return rows

    def _row(self, task: Task, index: int, text: str, reward: float, margin: float) -> Sample:
        said = [*task.messages, Message(role="assistant", content=text)]
        ids, tools = encode_chat(self._tokenizer, said), task.tools
        if tools:
            plain, ids = ids, encode_chat(self._tokenizer, said, tools=tools)
            if ids == plain:
                raise UserError(
                    f"task {task.id} has tools, and the chat template of this model shows none. Describe them in the "
                    "system message and leave the column tools out"
                )
        return replace(_row(task, ids, {len(ids) - 1: margin}, self._max_length), index=index, reward=reward)


class StepRows:
    """A solution as one row: the prompt, then step, separator, step, separator. Read at the end of each separator."""

    def __init__(self, tokenizer: Any, *, separator: str, max_length: int) -> None:
        self._tokenizer = tokenizer
        self._separator = separator
        self._separator_ids = encode(tokenizer, separator)
        if not self._separator_ids:
            raise UserError(f"the tokenizer makes no token of separator={separator!r}. Use another one.")
        self._max_length = max_length

    def __call__(self, task: Task) -> list[Sample]:
        labels, steps = self._labels(task), self._steps(task)
        if len(labels) != len(steps):
            raise UserError(
                f"task {task.id} has {len(steps)} steps between separators {self._separator!r} and {len(labels)} labels"
            )
        ids, labelled = self._prompt(task), dict[int, float]()
        for step, label in zip(steps, labels, strict=True):
            ids += self._encode(step) + self._separator_ids
            labelled[len(ids) - 1] = label
        return [_row(task, ids, labelled, self._max_length)]

    def _steps(self, task: Task) -> list[str]:
        return [piece.strip() for piece in (task.answer or "").split(self._separator) if piece.strip()]

    def _labels(self, task: Task) -> list[float]:
        given = str(task.extra.get("step_labels", ""))
        labels = [LABELS.get(label.strip()) for label in given.split(",")]
        known = [label for label in labels if label is not None]
        if len(known) < len(labels):
            raise UserError(f'task {task.id}: step_labels={given!r:.60} must be 1 (good) or 0 (bad) each, e.g. "1,1,0"')
        return known

    def _prompt(self, task: Task) -> list[int]:
        if self._tokenizer.chat_template:
            return encode_chat(self._tokenizer, task.messages, for_generation=True)
        return self._encode("\n\n".join(message.content for message in task.messages) + "\n\n")

    def _encode(self, text: str) -> list[int]:
        return encode(self._tokenizer, spell_out(self._tokenizer, text))


def _row(task: Task, ids: list[int], read: Mapping[int, float], max_length: int) -> Sample:
    """A row that is read at these positions; what the loss must know of each stands in its advantage."""
    require_length(task, len(ids), max_length)
    size = len(ids)
    return Sample(
        group_id=task.id,
        index=0,
        token_ids=ids,
        loss_mask=[int(place in read) for place in range(size)],
        behavior_logprobs=[0.0] * size,
        versions=[-1] * size,
        advantages=[read.get(place, 0.0) for place in range(size)],
        weights=[0.0] * size,
    )
