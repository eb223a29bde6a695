"""A trainer that was warmed up trains as one that was not, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from temper.batching.made_up import RowShape, made_up_rows
from temper.batching.pack import pack
from temper.errors import OutOfMemory
from temper.models.scorer import load_scorer
from temper.models.tiny import character_tokenizer, make_tiny_model
from temper.objectives import DIRECT_LOSSES, POLICY_GRADIENTS, Objective, PolicyObjective, resolve
from temper.trainer.critic import Critic
from temper.trainer.local import AuxiliaryModels, LocalTrainer, TrainerSettings
from temper.trainer.optim import OptimizerSettings
from temper.types import Batch, Sample
from tests.trainer.test_presets import columns_of, mixture_of_experts

OPTIMIZER = OptimizerSettings(learning_rate=0.01, weight_decay=0.1)
CPU = torch.device("cpu")
SHAPE = RowShape(prompt_tokens=4, completion_tokens=6, vocabulary=40)


def make_trainer(model: Any, objective: Objective, optimizer: OptimizerSettings = OPTIMIZER) -> LocalTrainer:
    wants_critic = isinstance(objective, PolicyObjective) and objective.critic is not None
    others = AuxiliaryModels(
        reference=deepcopy(model) if "reference" in objective.needs else None,
        teachers={"": deepcopy(model)} if objective.needs & {"teacher", "teacher_top_k", "divergence"} else {},
        critic=Critic(deepcopy(model), optimizer, total_steps=10) if wants_critic else None,
    )
    settings = TrainerSettings(optimizer=optimizer, temperature=0.9, total_steps=10, gradient_checkpointing=True)
    packing = partial(pack, tokens_per_microbatch=64)
    return LocalTrainer(model, character_tokenizer("abc"), objective, settings, pack=packing, others=others)


def state(trainer: LocalTrainer) -> Iterator[tuple[str, Tensor]]:
    """All that a trainer could carry over from a step that nobody keeps."""
    yield from trainer.publish().tensors.items()
    yield from trainer._optimizer.tensors().items()
    for name, parameter in trainer._model.named_parameters():
        yield f"gradient of {name}", torch.zeros(()) if parameter.grad is None else parameter.grad
    counts = (trainer.version, trainer._optimizer.num_steps, trainer._counter.take(), trainer._policy_step._trains_all)
    yield "counts", torch.tensor([float(count) for count in counts])
    yield "random numbers", torch.get_rng_state()
    if trainer._critic is not None:
        yield from (("critic/" + name, tensor) for name, tensor in trainer._critic.wholes()[0].items())


def require_equal(trainer: LocalTrainer, expected: dict[str, Tensor]) -> None:
    found = dict(state(trainer))
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def make_scorer(folder: Path) -> Any:
    size = {"layers": 2, "width": 16, "heads": 2, "kv_heads": 1, "mlp_width": 24, "context": 32}
    alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKL"
    return load_scorer(make_tiny_model(folder / "base", alphabet=alphabet, seed=0, **size), torch.float32, CPU)


def rows_for(objective: Objective) -> list[Sample]:
    shape = RowShape(
        prompt_tokens=4, completion_tokens=6, vocabulary=40, num_top=objective.top_k("sampler_top_k"),
    )  # fmt: skip
    return made_up_rows(shape, num_rows=4, group_size=2)


@pytest.mark.parametrize("name", [*POLICY_GRADIENTS, *DIRECT_LOSSES])
def test_warming_up_changes_nothing_whatever_the_objective(
    make_model: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    objective = resolve(name)
    model = mixture_of_experts() if "router" in objective.needs else make_model()
    trainer = make_trainer(make_scorer(tmp_path) if "scores" in objective.needs else model, objective)
    before = {name: tensor.clone() for name, tensor in state(trainer)}
    trainer.warm_up(rows_for(objective))
    require_equal(trainer, before)


def test_rows_with_keep_sets_are_rehearsed_as_such(make_model: Callable[..., Any]) -> None:
    trainer = make_trainer(make_model(), resolve("grpo_r1"))
    before = {name: tensor.clone() for name, tensor in state(trainer)}
    trainer.warm_up(made_up_rows(replace(SHAPE, has_keep_sets=True), num_rows=4, group_size=2))
    require_equal(trainer, before)


@pytest.mark.parametrize("states", ["float32", "8bit"])
def test_a_step_after_warming_up_is_the_step_without_it(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]], states: Any
) -> None:
    objective = resolve("grpo")
    optimizer = OptimizerSettings(learning_rate=0.01, weight_decay=0.1, states=states, noise_seed=3)
    cold, warmed = (make_trainer(make_model().to(torch.bfloat16), objective, optimizer) for _ in range(2))
    warmed.warm_up(rows_for(objective))
    results = [trainer.step(Batch(updates=(tuple(columns_of(make_rows())),))) for trainer in (cold, warmed)]
    assert results[0].metrics == results[1].metrics
    assert results[0].model_flops == results[1].model_flops
    require_equal(warmed, dict(state(cold)))


def test_every_pass_of_a_step_is_rehearsed(make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the backward pass the first step would compile it."""
    seen: list[str] = []
    monkeypatch.setattr(torch.Tensor, "backward", lambda *_: seen.append("backward"))
    trainer = make_trainer(make_model(), resolve("grpo"))
    trainer.warm_up(rows_for(resolve("grpo")))
    assert seen == ["backward"]


def test_only_one_microbatch_is_computed(make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(make_model(), resolve("grpo"))
    rehearsed: list[int] = []
    monkeypatch.setattr(trainer._policy_step, "rehearse", lambda part, facts: rehearsed.append(len(part[0].token_ids)))
    trainer.warm_up(made_up_rows(SHAPE, num_rows=40, group_size=4))
    assert rehearsed == [60], "six rows of ten tokens fit into 64"


def test_states_are_there_before_a_microbatch_is_tried(
    make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them a microbatch would fit that does not beside them."""
    trainer, seen = make_trainer(make_model(), resolve("grpo")), list[bool]()
    made = trainer._optimizer._state
    rehearse = trainer._policy_step.rehearse

    def watch(part: Any, facts: Any) -> None:
        seen.append(made._made is not None)
        rehearse(part, facts)

    monkeypatch.setattr(trainer._policy_step, "rehearse", watch)
    trainer.warm_up(rows_for(resolve("grpo")))
    assert seen == [True]
    own_steps = make_trainer(make_model(), resolve("trpo"))
    own_steps.warm_up(rows_for(resolve("trpo")))
    assert own_steps._optimizer._state._made is None, "never needed"


def test_states_without_room_are_no_matter_of_microbatches(
    make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(make_model(), resolve("grpo"))

    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB")

    monkeypatch.setattr(trainer._optimizer, "reserve", full)
    with pytest.raises(OutOfMemory, match="out of memory in optimizer: CUDA"):
        trainer.warm_up(rows_for(resolve("grpo")))
