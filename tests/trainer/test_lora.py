"""Training an adapter: the model below never changes, checkpoints hold the adapter alone, and everything that holds for
whole weights holds for it: resume, publication, references, microbatches."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from temper.batching.pack import pack
from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.errors import UserError
from temper.models.load import load_model
from temper.models.lora import wrapping
from temper.models.lora.wrapping import AdapterSettings, add_adapter, with_own_weights, without_adapter
from temper.models.save import save_model
from temper.models.tiny import character_tokenizer
from temper.objectives import PRESETS, Objective, resolve
from temper.trainer.local import AuxiliaryModels, LocalTrainer, TrainerSettings
from temper.trainer.optim import OptimizerSettings
from temper.trainer.weights import publish
from temper.types import Batch, Request, Sample, SamplingParams

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
KL = {"name": "kl", "coefficient": 0.1, "estimator": "k3"}
OPTIMIZER = OptimizerSettings(learning_rate=0.01, max_grad_norm=1e6)
ENGINE = EngineSettings(
    seed=0, block_size=4, num_blocks=64, max_running=4, tokens_per_step=64, max_length=64, steps_per_sync=1
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for config in (LlamaConfig(**SHAPE), Qwen2Config(**SHAPE)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config)
        made[config.model_type] = tmp_path_factory.mktemp(config.model_type)
        save_model(model, character_tokenizer("abc"), made[config.model_type])
    return made


def adapted(folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    made = AdapterSettings(**{"rank": 4, "alpha": 8.0, **settings})
    return add_adapter(load_model(folder, dtype, CPU), made, folder)


def make_trainer(
    model: Any, objective: Objective = PRESETS["dapo"], *, reference: Any = None, budget: int = 40, **settings: Any
) -> LocalTrainer:
    made = TrainerSettings(**{"optimizer": OPTIMIZER, "temperature": 1.0, "total_steps": 10, **settings})
    dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    packing = partial(pack, tokens_per_microbatch=budget, dtype=dtype)
    others = AuxiliaryModels(reference=reference)
    return LocalTrainer(model, character_tokenizer("abc"), objective, made, pack=packing, others=others)


def batch(*updates: Sequence[Sample]) -> Batch:
    return Batch(updates=tuple(tuple(update) for update in updates))


def weights(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.publish().tensors.items()}


def is_same(first: Any, second: Any) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def save(trainer: LocalTrainer, folder: Path) -> Path:
    folder.mkdir()
    trainer.save(folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_supervised_training_of_an_adapter_lowers_the_loss_and_leaves_the_model_alone(
    folders: dict[str, Path], make_rows: Callable[..., list[Sample]], family: str, dtype: torch.dtype
) -> None:
    rows = [replace(row, advantages=[float(m) for m in row.loss_mask]) for row in make_rows()]
    model = adapted(folders[family], dtype)
    trainer = make_trainer(model, PRESETS["reinforce"])
    losses = [trainer.step(batch(rows)).loss for _ in range(8)]
    assert losses[-1] < losses[0] - 0.3
    before = publish(load_model(folders[family], dtype, CPU), 0).tensors
    assert is_same(publish(without_adapter(model), 0).tensors, before)
    changed = {name for name, tensor in trainer.publish().tensors.items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if "_proj.weight" in name}
    # The same test sees training of all weights.
    whole = load_model(folders[family], dtype, CPU)
    make_trainer(whole, PRESETS["reinforce"]).step(batch(rows))
    assert not is_same(publish(whole, 0).tensors, before)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_reinforcement_of_an_adapter_makes_rewarded_rows_likelier(
    folders: dict[str, Path], make_rows: Callable[..., list[Sample]], family: str
) -> None:
    trainer, rows = make_trainer(adapted(folders[family])), make_rows()

    def gain() -> float:
        scored = zip(trainer.score(rows, "policy"), rows, strict=True)
        return sum(sum(p * a for p, a in zip(values, row.advantages, strict=True)) for values, row in scored)

    before = gain()
    for _ in range(5):
        result = trainer.step(batch(rows))
    assert gain() > before + 1
    assert result.metrics["policy/update_norm_ratio"] > 0


@pytest.mark.parametrize("budget", [1, 64])
def test_a_step_does_not_depend_on_the_microbatch_budget(
    folders: dict[str, Path], make_rows: Callable[..., list[Sample]], budget: int
) -> None:
    made = []
    for some in (30, budget):
        trainer = make_trainer(adapted(folders["qwen2"], torch.float64), budget=some)
        trainer.step(batch(make_rows(), make_rows(seed=1)))
        made.append(weights(trainer))
    for name in made[0]:
        torch.testing.assert_close(made[1][name], made[0][name], rtol=0, atol=1e-6)


def test_gradient_checkpointing_changes_no_result(
    folders: dict[str, Path], make_rows: Callable[..., list[Sample]]
) -> None:
    plain, saving = (
        make_trainer(adapted(folders["llama"]), gradient_checkpointing=is_saving) for is_saving in (False, True)
    )
    for trainer in (plain, saving):
        trainer.step(batch(make_rows()))
    assert is_same(weights(plain), weights(saving))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_loaded_training_goes_on_to_the_same_bits(
    folders: dict[str, Path], make_rows: Callable[..., list[Sample]], tmp_path: Path, dtype: torch.dtype
) -> None:
    batches = [batch(make_rows(seed=seed)) for seed in range(4)]
    straight = make_trainer(adapted(folders["qwen2"], dtype))
    straight_results = [straight.step(each) for each in batches]
    first = make_trainer(adapted(folders["qwen2"], dtype))
    for each in batches[:2]:
        first.step(each)
    saved = save(first, tmp_path / "saved")
    second = make_trainer(adapted(folders["qwen2"], dtype, seed=5))
    second.load(saved)
    results = [second.step(each) for each in batches[2:]]
    assert is_same(weights(straight), weights(second))
    assert is_same(straight._optimizer.tensors(), second._optimizer.tensors())
    assert [r.metrics for r in results] == [r.metrics for r in straight_results[2:]]
    # Without the load it would be another adapter, on the same model.
    assert not is_same(weights(straight), weights(make_trainer(adapted(folders["qwen2"], dtype, seed=5))))


def test_a_checkpoint_is_the_adapter_and_its_moments(
    folders: dict[str, Path], make_rows: Callable[..., list[Sample]], tmp_path: Path
) -> None:
    trainer = make_trainer(adapted(folders["llama"], rank=1))
    trainer.step(batch(make_rows()))
    whole = make_trainer(load_model(folders["llama"], torch.float32, CPU))
    whole.step(batch(make_rows()))
    sizes = []
    for name, each in (("adapter", trainer), ("whole", whole)):
        files = save(each, tmp_path / name).rglob("*.safetensors")
        sizes.append(sum(path.stat().st_size for path in files))
    assert sizes[0] < sizes[1] / 3
    assert sorted(path.name for path in (tmp_path / "adapter").rglob("*.safetensors")) == [
        "adapter_model.safetensors", "optimizer.safetensors",
    ]  # fmt: skip
    loaded = load_model(tmp_path / "adapter", torch.float32, CPU)
    assert is_same(publish(loaded, 0).tensors, weights(trainer))


def test_a_checkpoint_on_another_model_or_of_another_kind_is_refused_before_anything_changes(
    folders: dict[str, Path], make_rows: Callable[..., list[Sample]], tmp_path: Path
) -> None:
    trainer = make_trainer(adapted(folders["llama"]))
    trainer.step(batch(make_rows()))
    saved = save(trainer, tmp_path / "saved")
    other = Path(shutil.copytree(folders["llama"], tmp_path / "other"))
    model = AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    model.save_pretrained(other)
    same = Path(shutil.copytree(folders["llama"], tmp_path / "same"))
    make_trainer(adapted(same)).load(saved)  # where a model lies does not matter

    full = save(make_trainer(load_model(folders["llama"], torch.float32, CPU)), tmp_path / "full")
    cases = [
        (adapted(other), saved, r"is not that model: model.safetensors differs"),
        (adapted(folders["llama"], rank=2), saved, r"has r=4, and this run's has 2"),
        (adapted(folders["llama"], alpha=9.0), saved, r"has lora_alpha=8.0, and this run's has 9.0"),
        (adapted(folders["llama"]), full, r"has no adapter_config.json"),
        (load_model(folders["llama"], torch.float32, CPU), saved, r"holds an adapter and this run trains all weights"),
    ]
    for model, folder, reason in cases:
        refused = make_trainer(model)
        before = weights(refused)
        with pytest.raises(UserError, match=reason):
            refused.load(folder)
        assert is_same(weights(refused), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sampler_that_was_given_the_publication_is_the_policy_to_the_bit(
    folders: dict[str, Path], make_rows: Callable[..., list[Sample]], dtype: torch.dtype
) -> None:
    model, rows = adapted(folders["qwen2"], dtype), make_rows()
    trainer = make_trainer(model)
    held = with_own_weights(model)
    sampler = make_trainer(held.requires_grad_(True))
    own = dict(held.named_parameters())
    before = publish(without_adapter(model), 0).tensors
    copies = {name: tensor.clone() for name, tensor in before.items()}
    for _ in range(3):
        trainer.step(batch(rows))
        assert trainer.score(rows, "policy") != sampler.score(rows, "policy")  # a stale sampler is seen
        with torch.no_grad():
            for name, tensor in trainer.publish().tensors.items():
                own[name].copy_(tensor)
        assert trainer.score(rows, "policy") == sampler.score(rows, "policy")
    assert is_same(before, copies)


def test_an_engine_has_every_weight_merged_once(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(folders["llama"])
    held = with_own_weights(model)
    made: list[Any] = []
    merged = wrapping.merged_weight
    monkeypatch.setattr(wrapping, "merged_weight", lambda module, read: (made.append(module), merged(module, read))[1])
    publication = publish(model, 1)
    asyncio.run(LocalEngine(held, ENGINE).load(publication))
    assert len(made) == 2 * 7  # layers, linear layers of attention and feed-forward
    assert publication.alike is not None
    assert is_same(dict(publication.tensors), publish(held, 1).tensors)
    assert {n: t.shape for n, t in publication.alike.items()} == {n: t.shape for n, t in publication.tensors.items()}


def test_a_reference_without_adapter_equals_a_second_model(
    folders: dict[str, Path], make_rows: Callable[..., list[Sample]]
) -> None:
    objective = resolve("grpo", {"regularizers": [KL]})
    results = []
    for shares in (True, False):
        model = adapted(folders["llama"])
        reference = without_adapter(model) if shares else load_model(folders["llama"], torch.float32, CPU)
        trainer = make_trainer(model, objective, reference=reference)
        steps = [trainer.step(batch(make_rows(seed=seed))).metrics for seed in range(3)]
        results.append((steps, weights(trainer), trainer.score(make_rows(), "reference")))
    (steps, after, scores), (other_steps, other_after, other_scores) = results
    assert steps == other_steps
    assert is_same(after, other_after)
    assert scores == other_scores
    assert steps[-1]["loss/kl"] > 0  # the adapter on would be its own reference


def test_a_reference_that_moves_has_weights_of_its_own(
    folders: dict[str, Path], make_rows: Callable[..., list[Sample]]
) -> None:
    objective = resolve("grpo", {"regularizers": [KL], "reference": {"name": "reset", "every": 1}})
    model = adapted(folders["llama"])
    with pytest.raises(AssertionError, match="a moving reference needs own weights"):
        make_trainer(model, objective, reference=without_adapter(model))
    trainer = make_trainer(model, objective, reference=with_own_weights(model))
    rows = make_rows()
    trainer.step(batch(rows))
    assert trainer.score(rows, "reference") == trainer.score(rows, "policy")
    plain = load_model(folders["llama"], torch.float32, CPU)
    assert is_same(publish(without_adapter(model), 0).tensors, publish(plain, 0).tensors)


def test_a_trust_region_moves_the_factors_alone(
    folders: dict[str, Path], make_rows: Callable[..., list[Sample]]
) -> None:
    model = adapted(folders["qwen2"], torch.float64)
    trainer = make_trainer(model, PRESETS["trpo"])
    result = trainer.step(batch(make_rows()))
    assert result.metrics["policy/trust_accepted"] == 1.0
    plain = load_model(folders["qwen2"], torch.float64, CPU)
    assert is_same(publish(without_adapter(model), 0).tensors, publish(plain, 0).tensors)


def test_a_batch_without_updates_counts_a_version_and_changes_nothing(folders: dict[str, Path]) -> None:
    trainer = make_trainer(adapted(folders["llama"]))
    before = weights(trainer)
    trainer.step(batch())
    assert trainer.version == 1
    assert is_same(weights(trainer), before)


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_the_engine_draws_from_the_adapted_policy(
    folders: dict[str, Path], make_rows: Callable[..., list[Sample]], numerics: Any
) -> None:
    model = load_model(folders["qwen2"], torch.float32, CPU, numerics)
    model = add_adapter(model, AdapterSettings(rank=4), folders["qwen2"])
    trainer = make_trainer(model, reference=without_adapter(model))
    params = SamplingParams(temperature=1.0, max_new_tokens=8, stop_ids=())
    engine = LocalEngine(with_own_weights(model), ENGINE)

    async def drawn() -> tuple[Sample, list[float]]:
        await engine.load(trainer.publish())
        completion = await engine.generate(Request(id=f"{trainer.version}", prompt_ids=(3, 4, 5), params=params))
        ids, logprobs = list(completion.token_ids), list(completion.logprobs)
        mask = [0, 0, 0] + [1] * len(ids)
        zeros = [0.0] * len(mask)
        row = Sample(
            group_id="g", index=0, token_ids=[3, 4, 5, *ids], loss_mask=mask, behavior_logprobs=zeros,
            versions=[m - 1 for m in mask], advantages=zeros, weights=zeros,
        )  # fmt: skip
        return row, [0.0, 0.0, 0.0, *logprobs]

    async def compare() -> None:
        for step in range(2):
            row, logprobs = await drawn()
            (scored,) = trainer.score([row], "policy")
            assert scored == logprobs if numerics == "exact" else scored == pytest.approx(logprobs, abs=1e-4)
            (reference,) = trainer.score([row], "reference")
            assert (reference == pytest.approx(logprobs, abs=1e-2)) == (step == 0)
            trainer.step(batch(make_rows()))
        await engine.close()

    asyncio.run(compare())
