"""float16: the scale of the loss moves with overflows alone, leaves gradients as they are, is kept in checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from temper.batching.pack import pack
from temper.errors import BackendError
from temper.objectives import PRESETS
from temper.trainer import loss_scale
from temper.trainer.local import LocalTrainer, TrainerSettings
from temper.trainer.loss_scale import FIRST, GROW_AFTER, LossScale
from temper.trainer.optim import OptimizerSettings
from temper.types import Batch, Sample

MakeModel = Callable[..., Any]
MakeRows = Callable[..., list[Sample]]


class NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        """There is none."""


def make_trainer(model: Any) -> LocalTrainer:
    settings = TrainerSettings(optimizer=OptimizerSettings(learning_rate=1e-3), temperature=1.0, total_steps=9)
    return LocalTrainer(model, NoTokenizer(), PRESETS["grpo"], settings, pack=partial(pack, tokens_per_microbatch=64))


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def is_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_it_halves_with_every_overflow_down_to_one_and_doubles_after_many_good_updates() -> None:
    scale = LossScale()
    assert scale.after_overflow().factor == FIRST / 2
    for _ in range(GROW_AFTER - 1):
        scale = scale.after_update()
    assert scale.factor == FIRST
    assert scale.after_update() == LossScale(2 * FIRST)
    assert scale.after_overflow() == LossScale(FIRST / 2), "the count starts anew"
    assert LossScale(1.0).after_overflow() == LossScale(1.0)
    assert LossScale(1.0).is_at_its_end
    assert not LossScale(2.0).is_at_its_end


def test_a_scaled_step_is_close_to_one_in_float32(make_model: MakeModel, make_rows: MakeRows) -> None:
    norms = {}
    for dtype in (torch.float32, torch.float16):
        trainer = make_trainer(make_model("llama", dtype=dtype))
        metrics = trainer.step(Batch(updates=(tuple(make_rows()),))).metrics
        norms[dtype] = metrics["policy/grad_norm"]
        assert ("policy/loss_scale" in metrics) == (dtype == torch.float16)
    assert norms[torch.float16] == pytest.approx(norms[torch.float32], rel=0.02)


def test_gradients_too_small_for_float16_arrive_because_the_loss_is_scaled(
    make_model: MakeModel, make_rows: MakeRows
) -> None:
    """Rows of so little weight that their gradients are below the least float16; the mutation: a scale of 1."""
    rows = tuple(replace(row, weights=[weight * 1e-6 for weight in row.weights]) for row in make_rows())
    batch = Batch(updates=(rows,))
    wide = make_trainer(make_model("llama", dtype=torch.float32)).step(batch).metrics["policy/grad_norm"]
    narrow = make_trainer(make_model("llama", dtype=torch.float16)).step(batch).metrics["policy/grad_norm"]
    assert narrow == pytest.approx(wide, rel=0.05)
    unscaled = make_trainer(make_model("llama", dtype=torch.float16))
    unscaled._policy_step.loss_scale = LossScale(1.0)
    assert unscaled.step(batch).metrics["policy/grad_norm"] != pytest.approx(wide, rel=0.05)


def test_an_update_that_overflows_is_skipped_counted_and_lowers_the_scale(
    make_model: MakeModel, make_rows: MakeRows
) -> None:
    model = make_model("llama", dtype=torch.float16)
    trainer, before = make_trainer(model), weights_of(model)
    trainer._policy_step.loss_scale = LossScale(2.0**40, 7)
    metrics = trainer.step(Batch(updates=(tuple(make_rows()),))).metrics
    assert (metrics["policy/skipped_updates"], metrics["policy/loss_scale"]) == (1.0, 2.0**40)
    assert "policy/grad_norm" not in metrics
    assert is_same(before, weights_of(model))
    assert trainer._policy_step.loss_scale == LossScale(2.0**39)
    assert trainer.version == 1, "the step is over, and the next has other rows"
    trainer._policy_step.loss_scale = LossScale()
    assert trainer.step(Batch(updates=(tuple(make_rows()),))).metrics["policy/skipped_updates"] == 0.0
    assert not is_same(before, weights_of(model))


def test_an_overflow_that_no_scale_mends_is_refused(make_model: MakeModel, make_rows: MakeRows) -> None:
    model = make_model("llama", dtype=torch.float16)
    trainer = make_trainer(model)
    next(iter(model.parameters())).register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
    trainer._policy_step.loss_scale = LossScale(4.0)
    rows = Batch(updates=(tuple(make_rows()),))
    for _ in range(2):
        assert trainer.step(rows).metrics["policy/skipped_updates"] == 1.0
    with pytest.raises(BackendError, match="This update was not applied"):
        trainer.step(rows)


def test_the_scale_is_kept_in_a_checkpoint(
    make_model: MakeModel, make_rows: MakeRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_scale, "GROW_AFTER", 3)
    rows = [Batch(updates=(tuple(make_rows(seed=seed)),)) for seed in range(4)]
    model = make_model("llama", dtype=torch.float16)
    alone = make_trainer(model)
    for batch in rows[:2]:
        alone.step(batch)
    alone.save(tmp_path / "saved")
    resumed_model = make_model("llama", dtype=torch.float16, seed=1)
    resumed = make_trainer(resumed_model)
    resumed.load(tmp_path / "saved")
    for batch in rows[2:]:
        for trainer in (alone, resumed):
            trainer.step(batch)
        assert alone._policy_step.loss_scale == resumed._policy_step.loss_scale
    assert alone._policy_step.loss_scale == LossScale(2 * FIRST, 1)
    assert is_same(weights_of(model), weights_of(resumed_model))
