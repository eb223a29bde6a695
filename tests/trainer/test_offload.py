"""A model that waits on the CPU between its passes scores to the same bits, and is where it was afterwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from temper.batching.pack import pack
from temper.models.tiny import character_tokenizer
from temper.objectives import resolve
from temper.trainer import offload as offloading
from temper.trainer.local import AuxiliaryModels, LocalTrainer, TrainerSettings
from temper.trainer.offload import offload, on_device
from temper.trainer.optim import OptimizerSettings
from temper.types import Batch, Sample

CPU = torch.device("cpu")
SETTINGS = TrainerSettings(optimizer=OptimizerSettings(learning_rate=0.01), temperature=1.0, total_steps=4)


def places(model: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]


def make_trainer(model: Any, reference: Any, objective: Any) -> LocalTrainer:
    packing = partial(pack, tokens_per_microbatch=40)
    tokenizer = character_tokenizer("abc")
    return LocalTrainer(
        model, tokenizer, objective, SETTINGS, pack=packing, others=AuxiliaryModels(reference=reference)
    )


def test_it_is_elsewhere_during_a_pass_and_at_home_after_it(make_model: Callable[..., Any]) -> None:
    model = offload(make_model().requires_grad_(False), CPU)
    home = places(model)
    with on_device(model) as moved:
        assert moved is model
        away = places(model)
        assert not set(away) & set(home)
        with on_device(model):
            assert places(model) == away  # brought once
        assert places(model) == away
    assert places(model) == home
    with pytest.raises(RuntimeError, match="broken"), on_device(model):
        raise RuntimeError("broken")
    assert places(model) == home
    with on_device(model):  # the failed pass is not counted as one that still runs
        assert not set(places(model)) & set(home)


def test_a_model_that_was_not_offloaded_stays(make_model: Callable[..., Any]) -> None:
    model = make_model()
    with on_device(model) as same:
        assert same is model
    with pytest.raises(AssertionError, match="a model that is trained is not offloaded"):
        offload(model, CPU)


@pytest.mark.parametrize("moving", [{}, {"reference": {"name": "reset", "every": 2}}])
def test_training_against_an_offloaded_reference_is_the_same_to_the_bit(
    make_model: Callable[..., Any],
    make_rows: Callable[..., list[Sample]],
    monkeypatch: pytest.MonkeyPatch,
    moving: dict[str, Any],
) -> None:
    objective = resolve("grpo", {"regularizers": [{"name": "kl", "coefficient": 0.1, "estimator": "k3"}], **moving})
    moves: list[int] = []
    plain = offloading._lay_out
    monkeypatch.setattr(offloading, "_lay_out", lambda module: (moves.append(1), plain(module)))
    results = []
    for is_offloaded in (False, True):
        reference = make_model(dtype=torch.float32, seed=1).requires_grad_(False)
        reference = offload(reference, CPU) if is_offloaded else reference
        trainer = make_trainer(make_model(dtype=torch.float32), reference, objective)
        steps = [trainer.step(Batch(updates=(tuple(make_rows(seed=seed)),))) for seed in range(4)]
        results.append(([step.metrics for step in steps], trainer.score(make_rows(), "reference")))
    assert results[0] == results[1]
    assert results[0][0][0]["loss/kl"] != 0
    assert len(moves) >= 4  # one for each step at least: it did wait elsewhere
