"""Rows of given texts: a conversation with its answer, and which of its turns are trained.

Owns: the one way in which given answers become rows. Refuses: cutting a row that is too long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from temper.errors import UserError
from temper.tasks.render import SpokenRow
from temper.types import Message, Sample, Task

MAX_SKIPS = 10_000
"""Rows in a row that are too long, after which the data is taken to hold nothing else."""


class ExampleRenderer(Protocol):
    """Messages to ids; tasks/render.py implements it."""

    def prompt_messages(self, task: Task) -> tuple[Message, ...]: ...
    def spoken_rows(
        self, messages: Sequence[Message], turns: int | None = 1, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Sequence[SpokenRow]: ...


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


class RowTooLong(UserError):
    """A row does not fit."""


def require_length(task: Task, size: int, max_length: int, side: str = "") -> None:
    """Raises TooLong for a row of more tokens. Nothing is cut: a cut answer teaches to stop anywhere."""
    if size > max_length:
        raise RowTooLong(
            f"task {task.id}: {side or 'the row'} has {size} tokens, more than the limit of {max_length}: the "
            "model's context, or trainer.max_length where that is less. Nothing is cut. Shorten or remove the row, use "
            "a model with a longer context, or set trainer.max_length: longer rows are then dropped and counted"
        )


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
