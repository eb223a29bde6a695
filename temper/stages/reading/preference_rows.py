"""Rows of preferences that data brings: a pair, or a completion with a label.

Owns: what a task must have, and its rows, read as supervised training reads them. Refuses: batches (the kind of stage).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from temper.errors import UserError
from temper.objectives import Loss
from temper.stages.reading.examples import ExampleRenderer, conversation_rows, require_length
from temper.types import Column, Sample, Task, array_of


@dataclass(frozen=True, slots=True)
class RowRules:
    """How text becomes rows: the same for every row of a stage."""

    renderer: ExampleRenderer
    max_length: int
    """Tokens of a row at most, prompt and end token included."""

    def row(self, task: Task, text: str, index: int, reward: float) -> Sample:
        """Prompt, completion and end token, as supervised training reads them; the last two are compared. Raises
        TooLong, and UserError for what cannot be trained."""
        side = f"the {_SIDES[reward]} completion"
        if not text.strip():
            raise UserError(f"task {task.id}: {side} is empty. Remove the row or complete it")
        (row,) = conversation_rows(self.renderer, task, text)
        require_length(task, len(row.token_ids), self.max_length, f"{side} with its prompt")
        start = row.loss_mask.index(1)
        return make_row(task.id, index, row.token_ids[:start], row.token_ids[start:], reward)


_SIDES = {1.0: "chosen", 0.0: "rejected"}


def make_row(group_id: str, index: int, prompt: Sequence[int], completion: Sequence[int], reward: float) -> Sample:
    """The mask is from lengths, never from ids. No share in the loss yet."""
    size, mask = len(prompt) + len(completion), [0] * len(prompt) + [1] * len(completion)
    return Sample(
        group_id=group_id,
        index=index,
        token_ids=[*prompt, *completion],
        loss_mask=mask,
        behavior_logprobs=[0.0] * size,
        versions=[-1] * size,
        advantages=[0.0] * size,
        weights=[0.0] * size,
        reward=reward,
    )


def on_drawn(row: Sample, value: float) -> Column[float]:
    return Column(value * array_of(row.loss_mask, np.float64))


def pair_rows(rules: RowRules, task: Task) -> tuple[Sample, Sample]:
    """The chosen row and the rejected one of a task whose answer is preferred to extra["rejected"]."""
    rejected = task.extra.get("rejected")
    if task.answer is None or not isinstance(rejected, str):
        raise UserError(
            f"task {task.id} is no pair: it needs an answer and a rejected answer, and has "
            f"{'no answer' if task.answer is None else 'an answer'} and the columns {', '.join(task.extra) or 'none'}"
        )
    chosen, losing = rules.row(task, task.answer, 0, 1.0), rules.row(task, rejected, 1, 0.0)
    if chosen.token_ids == losing.token_ids:
        raise UserError(f"task {task.id}: chosen and rejected are equal, and a comparison of equals teaches nothing")
    is_policy = task.extra.get("is_chosen_from_policy")
    if not isinstance(is_policy, bool):
        return chosen, losing
    return (_by_policy(chosen), losing) if is_policy else (chosen, _by_policy(losing))


def _by_policy(row: Sample) -> Sample:
    """Rows with a version are the policy's own, as among rollouts; only xpo asks."""
    return replace(row, versions=[is_drawn - 1 for is_drawn in row.loss_mask])


def labelled_rows(rules: RowRules, task: Task) -> list[Sample]:
    """One row of a completion with a label; of a pair two, the chosen one desirable and the rejected one not."""
    if "rejected" in task.extra:
        return list(pair_rows(rules, task))
    label = task.extra.get("label")
    if task.answer is None or not isinstance(label, bool):
        raise UserError(
            f'task {task.id} has no labelled completion: it needs an answer and a "label" of true or false, or a '
            f"rejected answer, and has the columns {', '.join(task.extra) or 'none'}"
        )
    return [rules.row(task, task.answer, 0, float(label))]


def rows_maker(loss: Loss, rules: RowRules) -> Callable[[Task], Sequence[Sample]]:
    """What makes the rows of one task that the loss reads."""
    return partial(labelled_rows if loss.reads == "labelled" else pair_rows, rules)
