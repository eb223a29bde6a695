"""Supervised rows train the answer and its end, nothing else, and the loss is the mean negative log-likelihood."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch

from temper.errors import UserError
from temper.stages.sft import Examples, example_row, supervised_objective
from temper.tasks.dataset import Stream
from temper.tasks.generators import make_source
from temper.types import Message, Sample, Task


class Letters:
    def prompt_messages(self, task: Task) -> tuple[Message, ...]:
        return task.messages

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(ord(c) for m in messages for c in m.content)

    def completion_ids(self, text: str) -> list[int]:
        return [*map(ord, text), 0]


def task(answer: str | None = "ba") -> Task:
    return Task(id="t", messages=(Message(role="user", content="ab"),), answer=answer)


def stream() -> Stream:
    return Stream([make_source("spell_backward", {}, seed=1, size=5)], [1.0], seed=0)


def take(source: Examples, step: int) -> tuple[Sample, ...]:
    (samples,) = asyncio.run(source.take(step)).updates
    return samples


def examples(batch_size: int = 4) -> Examples:
    return Examples(stream(), Letters(), supervised_objective(), batch_size=batch_size, max_length=64)


def test_only_the_answer_and_its_end_are_trained() -> None:
    row = example_row(Letters(), task(), max_length=10)
    assert row.token_ids == [97, 98, 98, 97, 0]
    assert row.loss_mask == [0, 0, 1, 1, 1]
    assert row.advantages == [0.0, 0.0, 1.0, 1.0, 1.0]


def test_weights_of_a_batch_are_one_over_its_answer_tokens() -> None:
    samples = take(examples(), 1)
    weights = torch.tensor([w for sample in samples for w in sample.weights if w])
    assert torch.allclose(weights, torch.full_like(weights, 1 / len(weights)))


def test_a_repeated_task_is_two_rows() -> None:
    samples = take(examples(batch_size=8), 1)  # five tasks, so some are drawn twice
    assert len({sample.group_id for sample in samples}) == 8


def test_state_continues_the_same_examples() -> None:
    one, other = examples(), examples()
    take(one, 1)
    other.load_state(one.state())
    assert [s.token_ids for s in take(one, 2)] == [s.token_ids for s in take(other, 2)]


@pytest.mark.parametrize(("bad", "message"), [(task(None), "has no answer"), (task("b" * 90), "context of 64")])
def test_rows_that_cannot_be_trained_are_named(bad: Task, message: str) -> None:
    with pytest.raises(UserError, match=message):
        example_row(Letters(), bad, max_length=64)
