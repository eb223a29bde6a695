"""Supervised fine-tuning as a source of batches: the loop, the trainer and the objective are those of RL.

Owns: rows from conversations, and which of their turns are trained. Refuses: cutting a row that is too long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from temper.batching.rows import domain_of
from temper.errors import UserError
from temper.objectives import Extent, Objective
from temper.objectives.losses.likelihood import SFT
from temper.stages.stream import StreamSource, TaskStream
from temper.types import Batch, Column, Message, Sample, Task, array_of

MAX_SKIPS = 10_000
"""Rows in a row that are too long, after which the data is taken to hold nothing else."""


class SpokenRow(Protocol):
    """Ids of a conversation; 1 where an assistant said what is to be learned."""

    token_ids: list[int]
    loss_mask: list[int]


class ExampleRenderer(Protocol):
    """Messages to ids; tasks/render.py implements it."""

    def prompt_messages(self, task: Task) -> tuple[Message, ...]: ...
    def spoken_rows(
        self, messages: Sequence[Message], turns: int | None = 1, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Sequence[SpokenRow]: ...


def supervised_objective() -> Objective:
    """Mean negative log-likelihood per trained token."""
    return SFT


def example_rows(renderer: ExampleRenderer, task: Task, *, max_length: int) -> list[Sample]:
    """The task's conversation with its answer. One row, or several where the chat template rewrites history.

    Only assistants are trained: the answer, and the turns before it that extra["trained_turns"] names ("all", or how
    many of the last). Their ends are trained with them. A row longer than `max_length` is an error.
    """
    if not (task.answer or "").strip():
        raise UserError(f"task {task.id} has no answer, and supervised training needs one. Set train.answer_field")
    rows = conversation_rows(renderer, task, str(task.answer), turns=_turns(task))
    require_length(task, max(len(row.token_ids) for row in rows), max_length)
    return [_sample(task.id, row) for row in rows]


def conversation_rows(renderer: ExampleRenderer, task: Task, answer: str, *, turns: int | None = 1) -> list[SpokenRow]:
    """The task's conversation with this answer, as the chat template writes it and with the row's own tools.

    The one way in which given answers become ids: imitated, preferred or rejected, the same answer is the same tokens.
    """
    messages = (*renderer.prompt_messages(task), Message(role="assistant", content=answer))
    try:
        return list(renderer.spoken_rows(messages, turns, task.tools))
    except UserError as error:
        raise UserError(f"task {task.id}: {error}") from error


class TooLong(UserError):
    """A row does not fit."""


def require_length(task: Task, size: int, max_length: int, side: str = "") -> None:
    """Raises TooLong for a row of more tokens. Nothing is cut: a cut answer teaches to stop anywhere."""
    if size > max_length:
        raise TooLong(
            f"task {task.id}: {side or 'the row'} has {size} tokens, more than the limit of {max_length}: the "
            "model's context, or trainer.max_length where that is less. Nothing is cut. Shorten or remove the row, use "
            "a model with a longer context, or set trainer.max_length: longer rows are then dropped and counted"
        )


class Examples(StreamSource):
    """Implements protocols.BatchSource over a stream of tasks with answers."""

    def __init__(
        self,
        stream: TaskStream,
        renderer: ExampleRenderer,
        objective: Objective,
        *,
        batch_size: int,
        max_length: int,
        drops_long: bool = False,
    ) -> None:
        """`drops_long`: tasks that do not fit are passed over and counted, in place of an error."""
        super().__init__(stream)
        self._renderer = renderer
        self._objective = objective
        self._batch_size = batch_size
        self._max_length = max_length
        self._drops_long = drops_long

    async def take(self, step: int) -> Batch:
        examples: list[list[Sample]] = []
        dropped = 0
        while len(examples) < self._batch_size:
            draw, task = self._stream.next()
            try:
                rows = example_rows(self._renderer, task, max_length=self._max_length)
            except TooLong:
                dropped += 1
                if not self._drops_long or dropped > MAX_SKIPS:
                    raise
                continue
            # Named by its draw, so that a task which is drawn twice stays two trajectories.
            examples.append([replace(row, group_id=f"{task.id}#{draw}", teacher=domain_of(task)) for row in rows])
        lengths = torch.tensor([sum(row.num_actions for row in rows) for rows in examples])
        extent = Extent(lengths=lengths, group_ids=torch.arange(len(examples)), max_new_tokens=self._max_length)
        weights = self._objective.weighting(extent).tolist()
        samples = tuple(_weighted(row, w) for rows, w in zip(examples, weights, strict=True) for row in rows)
        metrics = {"data/examples": float(len(examples)), "gen/len_mean": lengths.double().mean().item()}
        if self._drops_long:
            metrics["data/too_long"] = float(dropped)
        return Batch(updates=(samples,), metrics=metrics)


def _turns(task: Task) -> int | None:
    """How many of the last assistant turns are trained; None: all."""
    wanted = str(task.extra.get("trained_turns", "1"))
    if wanted == "all":
        return None
    if not wanted.isdecimal() or int(wanted) < 1:
        raise UserError(f'task {task.id}: trained_turns is {wanted!r}; it must be "all" or a number from 1')
    return int(wanted)


def _sample(name: str, row: SpokenRow) -> Sample:
    size = len(row.token_ids)
    return Sample(
        group_id=name,
        index=0,
        token_ids=list(row.token_ids),
        loss_mask=list(row.loss_mask),
        behavior_logprobs=[0.0] * size,
        versions=[-1] * size,
        advantages=[float(m) for m in row.loss_mask],
        weights=[0.0] * size,
    )


def _weighted(row: Sample, weight: float) -> Sample:
    return replace(row, weights=Column(weight * array_of(row.loss_mask, np.float64)))
