"""What an agent drew trains the same, in however many rows its calls were laid out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from temper.batching import CreditRules, assign_credit, rows_of
from temper.batching.pack import pack
from temper.models.tiny import character_tokenizer
from temper.objectives import resolve
from temper.rollout.agents import DrawnCall, in_rows
from temper.trainer.local import LocalTrainer, TrainerSettings
from temper.trainer.optim import OptimizerSettings
from temper.types import Completion, Finish, Group, Message, Sample, Score, Status, Task, Trajectory, Turn


def call(prompt: Sequence[int], drawn: Sequence[int]) -> DrawnCall:
    completion = Completion(
        prompt_ids=tuple(prompt),
        token_ids=list(drawn),
        logprobs=[-3.0 - 0.1 * place for place in range(len(drawn))],
        versions=[0] * len(drawn),
        finish=Finish.STOP,
    )
    return DrawnCall(completion=completion, text="", messages=())


# Two conversations side by side, of three calls and of two, and a call that rewrites the history of the first.
FIRST = [call([5, 6], [7, 8]), call([5, 6, 7, 8, 9], [10]), call([5, 6, 7, 8, 9, 10, 11], [12, 13, 14])]
SECOND = [call([20], [21]), call([20, 21, 22], [23, 24])]
REWRITTEN = call([5, 6, 30], [31])
CALLS = [FIRST[0], SECOND[0], FIRST[1], SECOND[1], REWRITTEN, FIRST[2]]


def trajectory(index: int, calls: Sequence[DrawnCall], reward: float) -> Trajectory:
    said = Message(role="assistant", content="")
    return Trajectory(
        task_id="t",
        group_id="g",
        index=index,
        turns=tuple(Turn(completion=one.completion, message=said) for one in calls),
        status=Status.COMPLETED,
        score=Score.of(reward),
    )


def test_calls_side_by_side_are_laid_out_row_by_row() -> None:
    assert in_rows(CALLS) == [*FIRST, *SECOND, REWRITTEN]
    rows = rows_of(trajectory(0, in_rows(CALLS), 1.0))
    assert [list(row.token_ids) for row in rows] == [
        [5, 6, 7, 8, 9, 10, 11, 12, 13, 14],
        [20, 21, 22, 23, 24],
        [5, 6, 30, 31],
    ]
    assert [list(row.loss_mask) for row in rows] == [[0, 0, 1, 1, 0, 1, 0, 1, 1, 1], [0, 1, 0, 1, 1], [0, 0, 0, 1]]


def test_two_that_go_on_from_one_place_train_what_they_share_once() -> None:
    rows = rows_of(trajectory(0, in_rows([FIRST[0], FIRST[1], call([5, 6, 7, 8, 40], [41])]), 1.0))
    assert [list(row.loss_mask) for row in rows] == [[0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 1]]


Gradient = dict[str, torch.Tensor]


def gradient(model: Any, preset: str, rows_of_member: Callable[[Trajectory], list[Sample]]) -> tuple[float, Gradient]:
    """Loss and gradient of one step."""
    members = (trajectory(0, in_rows(CALLS), 1.0), trajectory(1, [call([5, 6], [15, 16])], 0.0))
    group = Group(id="g", draw=0, task=Task(id="t", messages=()), trajectories=members)
    objective = resolve(preset)
    rules = CreditRules(objective=objective, max_new_tokens=8)
    batch = assign_credit([row for one in members for row in rows_of_member(one)], [group], rules, version=0)
    settings = TrainerSettings(optimizer=OptimizerSettings(learning_rate=0.1), temperature=1.0, total_steps=10)
    packing = partial(pack, tokens_per_microbatch=12, dtype=torch.float64)
    trainer = LocalTrainer(model, character_tokenizer("abc"), objective, settings, pack=packing)
    found: Gradient = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: found.update({name: p.grad.clone()}))
    return trainer.step(batch).loss, found


def one_row_per_call(member: Trajectory) -> list[Sample]:
    return [row for turn in member.turns for row in rows_of(dataclasses.replace(member, turns=(turn,)))]


@pytest.mark.parametrize("preset", ["grpo", "dapo", "dr_grpo", "gspo", "reinforce"])
def test_the_gradient_does_not_depend_on_how_calls_share_rows(make_model: Callable[..., Any], preset: str) -> None:
    (loss, shared), (other_loss, alone) = (gradient(make_model(), preset, rows) for rows in (rows_of, one_row_per_call))
    assert len(one_row_per_call(trajectory(0, in_rows(CALLS), 1.0))) == len(CALLS)
    assert loss == pytest.approx(other_loss, abs=1e-7)
    for name in shared:
        # The head is float32, also over a model of float64.
        torch.testing.assert_close(shared[name], alone[name], rtol=0, atol=1e-6)
    assert max(values.abs().max() for values in shared.values()) > 0.01
