"""Training an adapter over a base in 4 bits: it learns, resumes to the bit, and the engine draws from it."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from temper.batching.pack import pack
from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.errors import BackendError, UserError
from temper.models.load import load_model
from temper.models.lora.wrapping import (
    AdapterSettings,
    adapter_tensors,
    add_adapter,
    load_base,
    with_own_factors,
    without_adapter,
)
from temper.models.save import save_model, saved_tensors
from temper.models.tiny import character_tokenizer
from temper.objectives import PRESETS, Objective, resolve
from temper.parity.budgets import DepthAndWidth, budget_of
from temper.parity.check import Canary, Sides
from temper.trainer.local import AuxiliaryModels, LocalTrainer, TrainerSettings
from temper.trainer.optim import OptimizerSettings
from temper.types import Batch, Sample, SamplingParams

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
ENGINE = EngineSettings(
    seed=0, block_size=4, num_blocks=256, max_running=8, tokens_per_step=64, max_length=64, steps_per_sync=1
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(Qwen2Config(**SHAPE))
    made = tmp_path_factory.mktemp("qwen2")
    save_model(model, character_tokenizer("abc"), made)
    return made


def four_bits(folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0, numerics: Any = "fast") -> Any:
    load = partial(load_model, numerics=numerics)
    plain = load_base(folder, dtype, CPU, load=load, base="4bit")
    return add_adapter(plain, AdapterSettings(rank=4, alpha=8.0, seed=seed), folder)


def make_trainer(
    model: Any, objective: Objective = PRESETS["dapo"], *, reference: Any = None, budget: int = 40, **settings: Any
) -> LocalTrainer:
    optimizer = OptimizerSettings(learning_rate=0.01, max_grad_norm=1e6)
    made = TrainerSettings(optimizer=optimizer, temperature=1.0, total_steps=10, **settings)
    dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    packing = partial(pack, tokens_per_microbatch=budget, dtype=dtype)
    others = AuxiliaryModels(reference=reference)
    return LocalTrainer(model, character_tokenizer("abc"), objective, made, pack=packing, others=others)


def batch(rows: list[Sample]) -> Batch:
    return Batch(updates=(tuple(rows),))


def state(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.publish().tensors.items()}


def is_same(first: Any, second: Any) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_factors_learn_and_the_base_stays(
    folder: Path, make_rows: Callable[..., list[Sample]], dtype: torch.dtype
) -> None:
    rows = [replace(row, advantages=[float(m) for m in row.loss_mask]) for row in make_rows()]
    model = four_bits(folder, dtype)
    trainer = make_trainer(model, PRESETS["reinforce"])
    before = state(trainer)
    losses = [trainer.step(batch(rows)).loss for _ in range(8)]
    assert losses[-1] < losses[0] - 0.3
    changed = {name for name, tensor in trainer.publish().tensors.items() if not torch.equal(tensor, before[name])}
    assert changed == adapter_tensors(model).keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_loaded_training_goes_on_to_the_same_bits(
    folder: Path, make_rows: Callable[..., list[Sample]], tmp_path: Path, dtype: torch.dtype
) -> None:
    batches = [batch(make_rows(seed=seed)) for seed in range(4)]
    straight, first = make_trainer(four_bits(folder, dtype)), make_trainer(four_bits(folder, dtype))
    for each in batches:
        straight.step(each)
    for each in batches[:2]:
        first.step(each)
    first.save(tmp_path)
    second = make_trainer(four_bits(folder, dtype, seed=5))
    second.load(tmp_path)
    for each in batches[2:]:
        second.step(each)
    assert is_same(state(straight), state(second))
    assert is_same(straight._optimizer.tensors(), second._optimizer.tensors())
    full = add_adapter(load_model(folder, dtype, CPU), AdapterSettings(rank=4, alpha=8.0), folder)
    with pytest.raises(UserError, match=r'base="4bit", and this run has "full"'):
        make_trainer(full).load(tmp_path)


def test_a_step_depends_neither_on_microbatches_nor_on_checkpointing(
    folder: Path, make_rows: Callable[..., list[Sample]]
) -> None:
    made = []
    for budget, checkpoints in ((30, False), (64, False), (30, True)):
        trainer = make_trainer(four_bits(folder, torch.float64), budget=budget, gradient_checkpointing=checkpoints)
        trainer.step(batch(make_rows()))
        made.append(state(trainer))
    for name, tensor in made[0].items():
        torch.testing.assert_close(made[1][name], tensor, rtol=0, atol=1e-6)
    assert is_same(made[0], made[2])


def test_the_reference_is_the_base_without_its_adapter(folder: Path, make_rows: Callable[..., list[Sample]]) -> None:
    model = four_bits(folder)
    objective = resolve("grpo", {"regularizers": [{"name": "kl", "coefficient": 0.1, "estimator": "k3"}]})
    trainer = make_trainer(model, objective, reference=without_adapter(model))
    rows = make_rows()
    assert trainer.score(rows, "reference") == trainer.score(rows, "policy")
    for _ in range(2):
        result = trainer.step(batch(rows))
    assert result.metrics["loss/kl"] > 0


def test_a_trust_region_moves_the_factors(folder: Path, make_rows: Callable[..., list[Sample]]) -> None:
    trainer = make_trainer(four_bits(folder, torch.float64), PRESETS["trpo"])
    assert trainer.step(batch(make_rows())).metrics["policy/trust_accepted"] == 1.0


def sides(trainer: LocalTrainer, engine: LocalEngine, dtype: str, numerics: Any = "fast") -> Sides:
    return Sides(
        sampler=engine,
        recompute=trainer.score,
        params=SamplingParams(temperature=1.0, max_new_tokens=64, stop_ids=()),
        budget=budget_of("qwen2", dtype, "local", numerics, DepthAndWidth(num_layers=2, width=32)),
        find_stale=None,
        bos_id=None,
        seconds=60.0,
    )


async def prove(trainer: LocalTrainer, engine: LocalEngine, dtype: str = "float32", numerics: Any = "fast") -> Any:
    prompts = [(3, 4, 5), (7, 8, 9, 10), (1, 2)]
    canary = Canary(sides(trainer, engine, dtype, numerics), prompts, name="canary")
    return await canary.check(trainer.version)


@pytest.mark.parametrize(
    ("dtype", "numerics"), [("float32", "fast"), ("float32", "exact"), ("bfloat16", "fast"), ("bfloat16", "exact")]
)
def test_the_gate_passes_after_training(
    folder: Path, make_rows: Callable[..., list[Sample]], dtype: str, numerics: Any
) -> None:
    model = four_bits(folder, getattr(torch, dtype), numerics=numerics)
    trainer = make_trainer(model)
    for own in (model, with_own_factors(model)):  # one policy for both, or an engine that runs ahead
        engine = LocalEngine(own, ENGINE)
        trainer.step(batch(make_rows()))
        asyncio.run(engine.load(trainer.publish()))
        asyncio.run(prove(trainer, engine, dtype, numerics))


def test_the_gate_sees_a_wrong_scale_and_a_stale_factor(folder: Path, make_rows: Callable[..., list[Sample]]) -> None:
    model = four_bits(folder)
    trainer = make_trainer(model)
    wrong = copy.deepcopy(model)
    wrong.get_decoder().layers[1].mlp.down_proj.base_layer.scales.mul_(1.05)
    with pytest.raises(BackendError):
        asyncio.run(prove(trainer, LocalEngine(wrong, ENGINE)))
    stale = with_own_factors(model)
    for _ in range(3):
        trainer.step(batch(make_rows()))
    with pytest.raises(BackendError):
        asyncio.run(prove(trainer, LocalEngine(stale, ENGINE, version=trainer.version)))


def test_a_publication_copies_the_factors_alone(folder: Path, make_rows: Callable[..., list[Sample]]) -> None:
    model = four_bits(folder)
    own = with_own_factors(model)
    trainer, engine = make_trainer(model), LocalEngine(own, ENGINE)
    trainer.step(batch(make_rows()))
    base = [tensor.data_ptr() for tensor in own.buffers()]
    asyncio.run(engine.load(trainer.publish()))
    assert is_same({n: t.detach() for n, t in saved_tensors(own).items()}, dict(trainer.publish().tensors))
    assert [tensor.data_ptr() for tensor in own.buffers()] == base == [t.data_ptr() for t in model.buffers()]
