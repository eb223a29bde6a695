"""A student trained by each loss comes nearer to its teachers; training that was saved goes on to the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from temper.batching.pack import pack
from temper.errors import UserError
from temper.models.tiny import character_tokenizer
from temper.objectives import Objective
from temper.objectives.losses.divergences import gkd, k3, top_k_teacher
from temper.objectives.presets.distillation import GKD, PRESETS
from temper.objectives.presets.groups import GRPO
from temper.trainer.local import AuxiliaryModels, LocalTrainer, TrainerSettings
from temper.trainer.optim import OptimizerSettings
from temper.trainer.passes.scoring import ScoringPasses
from temper.types import Batch, Sample

MakeModel = Callable[..., Any]
MakeRows = Callable[..., list[Sample]]
OBJECTIVES = [*PRESETS, replace(GKD, name="opd_top_k", loss=top_k_teacher(k=5)), replace(GKD, loss=k3())]


def make_trainer(model: Any, teachers: dict[str, Any], objective: Objective, budget: int = 40) -> LocalTrainer:
    settings = TrainerSettings(
        optimizer=OptimizerSettings(learning_rate=0.02, max_grad_norm=10.0), temperature=1.0, total_steps=20
    )
    packing = partial(pack, tokens_per_microbatch=budget, dtype=torch.float64)
    others = AuxiliaryModels(teachers=teachers)
    return LocalTrainer(model, character_tokenizer("abc"), objective, settings, pack=packing, others=others)


def batch(rows: list[Sample]) -> Batch:
    return Batch(updates=(tuple(replace(row, teacher=row.group_id) for row in rows),))


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: str(objective.loss))
def test_a_student_comes_nearer_to_its_teachers(
    make_model: MakeModel, make_rows: MakeRows, objective: Objective
) -> None:
    teachers = {"g0": make_model(seed=2), "": make_model(seed=3)}
    trainer = make_trainer(make_model(seed=1), teachers, objective)
    before = {name: parameter.clone() for name, parameter in teachers["g0"].named_parameters()}
    results = [trainer.step(batch(make_rows())) for _ in range(10)]
    first, last = (results[place].metrics["distillation/divergence"] for place in (0, -1))
    assert first > 0
    assert last < 0.5 * first
    assert results[0].loss == pytest.approx(results[0].metrics["loss/distillation"])
    assert all(torch.equal(before[name], p) for name, p in teachers["g0"].named_parameters())


def test_training_that_was_saved_goes_on_to_the_same_bits(
    make_model: MakeModel, make_rows: MakeRows, tmp_path: Path
) -> None:
    def trainer() -> LocalTrainer:
        return make_trainer(make_model(seed=1), {"": make_model(seed=2)}, replace(GKD, loss=gkd()))

    whole = trainer()
    expected = [whole.step(batch(make_rows(seed=seed))).loss for seed in range(4)]
    first = trainer()
    losses = [first.step(batch(make_rows(seed=seed))).loss for seed in range(2)]
    first.save(tmp_path)
    second = trainer()
    second.load(tmp_path)
    losses += [second.step(batch(make_rows(seed=seed))).loss for seed in range(2, 4)]
    assert losses == expected
    theirs = second.publish().tensors
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in whole.publish().tensors.items())


def test_a_direct_loss_asks_no_policy_of_the_batchs_start(make_rows: MakeRows) -> None:
    """There is no policy here to ask; a policy gradient of several updates would need one."""
    (microbatch,) = pack(make_rows(), 1000)
    assert ScoringPasses({}, GKD, 1.0).with_proximal(microbatch, is_only=False) is microbatch
    with pytest.raises(UserError, match="needs a policy model"):
        ScoringPasses({}, GRPO, 1.0).with_proximal(microbatch, is_only=False)
