"""Supervised fine-tuning as a source of batches: the loop, the trainer and the objective are those of RL.

Owns: rows from tasks with answers. A supervised step is a policy gradient with advantage 1 on given tokens: the loss is
the mean negative log-likelihood of the answer's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from temper.errors import UserError
from temper.objectives import Extent, Objective, resolve
from temper.types import Batch, Message, Sample, Scalar, Task


class ExampleRenderer(Protocol):
    """Messages to ids; tasks/render.py implements it."""

    def prompt_messages(self, task: Task) -> tuple[Message, ...]: ...
    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]: ...
    def completion_ids(self, text: str) -> list[int]: ...


class TaskStream(Protocol):
    def next(self) -> tuple[int, Task]: ...
    def state(self) -> dict[str, Scalar | list[Scalar]]: ...
    def load_state(self, state: Mapping[str, Scalar | list[Scalar]]) -> None: ...


def supervised_objective() -> Objective:
    """Mean negative log-likelihood per answer token."""
    return resolve("reinforce", {"weighting": "token_mean"})


def example_row(renderer: ExampleRenderer, task: Task, *, max_length: int) -> Sample:
    """Prompt, answer and end token as one row; only answer and end token are trained."""
    if task.answer is None:
        raise UserError(f"task {task.id} has no answer, and supervised training needs one. Set train.answer_field")
    prompt = renderer.prompt_ids(renderer.prompt_messages(task))
    answer = renderer.completion_ids(task.answer)
    if len(prompt) + len(answer) > max_length:
        raise UserError(
            f"task {task.id} has {len(prompt)} + {len(answer)} tokens, more than the model's context of {max_length}"
        )
    size = len(prompt) + len(answer)
    mask = [0] * len(prompt) + [1] * len(answer)
    return Sample(
        group_id=task.id,
        index=0,
        token_ids=[*prompt, *answer],
        loss_mask=mask,
        behavior_logprobs=[0.0] * size,
        versions=[-1] * size,
        advantages=[float(m) for m in mask],
        weights=[0.0] * size,
    )


class Examples:
    """Implements protocols.BatchSource over a stream of tasks with answers."""

    def __init__(
        self, stream: TaskStream, renderer: ExampleRenderer, objective: Objective, *, batch_size: int, max_length: int
    ) -> None:
        self._stream = stream
        self._renderer = renderer
        self._objective = objective
        self._batch_size = batch_size
        self._max_length = max_length

    async def start(self) -> None:
        """Nothing runs ahead."""

    async def take(self, step: int) -> Batch:
        draws = [self._stream.next() for _ in range(self._batch_size)]
        rows = [
            (f"{task.id}#{draw}", example_row(self._renderer, task, max_length=self._max_length))
            for draw, task in draws
        ]
        lengths = torch.tensor([row.num_actions for _, row in rows])
        extent = Extent(lengths=lengths, group_ids=torch.arange(len(rows)), max_new_tokens=self._max_length)
        weights = self._objective.weighting(extent).tolist()
        samples = tuple(_weighted(row, name, weight) for (name, row), weight in zip(rows, weights, strict=True))
        return Batch(
            updates=(samples,),
            metrics={"data/examples": float(len(rows)), "gen/len_mean": lengths.double().mean().item()},
        )

    async def release(self, version: int) -> None:
        """Nothing waits for the weights."""

    def state(self) -> dict[str, Scalar | list[Scalar]]:
        return self._stream.state()

    def load_state(self, state: Mapping[str, Scalar | list[Scalar]]) -> None:
        self._stream.load_state(state)

    async def close(self) -> None:
        """Nothing to close."""


def _weighted(row: Sample, name: str, weight: float) -> Sample:
    """The row with its share in the loss; named by its draw, so that a repeated task stays two rows."""
    return Sample(
        group_id=name,
        index=row.index,
        token_ids=row.token_ids,
        loss_mask=row.loss_mask,
        behavior_logprobs=row.behavior_logprobs,
        versions=row.versions,
        advantages=row.advantages,
        weights=[weight * m for m in row.loss_mask],
    )
