"""A step is what it says: one version, one proximal policy per batch, nothing applied when a number is not finite,
and training that was saved and loaded goes on to the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from temper.batching.pack import pack
from temper.errors import BackendError, UserError
from temper.folders.integrity import sha256_of
from temper.models.load import load_model
from temper.models.tiny import character_tokenizer
from temper.objectives import PRESETS, Objective, resolve
from temper.trainer.local import AuxiliaryModels, LocalTrainer, TrainerSettings
from temper.trainer.optim import OptimizerSettings
from temper.types import Batch, Sample

OPTIMIZER = OptimizerSettings(learning_rate=0.01, schedule="linear", warmup_steps=2, max_grad_norm=1e6)


def make_trainer(
    model: Any,
    objective: Objective = PRESETS["dapo"],
    budget: int = 40,
    reference: Any = None,
    **settings: Any,
) -> LocalTrainer:
    made = TrainerSettings(**{"optimizer": OPTIMIZER, "temperature": 0.9, "total_steps": 10, **settings})
    dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    packing = partial(pack, tokens_per_microbatch=budget, dtype=dtype)
    others = AuxiliaryModels(reference=reference)
    return LocalTrainer(model, character_tokenizer("abc"), objective, made, pack=packing, others=others)


def batch(*updates: Sequence[Sample]) -> Batch:
    return Batch(updates=tuple(tuple(update) for update in updates))


def weights(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.publish().tensors.items()}


def is_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_step_moves_the_weights_once_and_reports_norm_and_rate(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]]
) -> None:
    trainer = make_trainer(make_model())
    before = weights(trainer)
    result = trainer.step(batch(make_rows()))
    assert trainer.version == trainer.publish().version == 1
    assert not is_same(before, weights(trainer))
    assert result.metrics["policy/learning_rate"] == pytest.approx(0.005)
    assert result.metrics["policy/grad_norm"] > 0
    assert result.metrics["policy/ratio_max"] == 1.0
    assert result.loss == pytest.approx(result.metrics["loss/policy"])
    phases = {"pack", "reference", "proximal", "measure", "forward_backward", "optimizer", "trace"}
    assert set(result.seconds) == phases
    assert trainer.peak_memory_bytes() > 10_000_000


def test_rows_that_were_packed_ahead_train_alike_and_others_are_not_taken_for_them(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]]
) -> None:
    first, second = batch(make_rows()), batch(make_rows(seed=1))
    plain, ready, astray = (make_trainer(make_model()) for _ in range(3))
    ready.prepack(first.updates)
    astray.prepack(second.updates)
    results = [trainer.step(first) for trainer in (plain, ready, astray)]
    assert len({result.loss for result in results}) == 1
    assert is_same(weights(plain), weights(ready))
    assert is_same(weights(plain), weights(astray))
    assert ready.step(second).loss == plain.step(second).loss != results[0].loss, "what was packed is used once"


@pytest.mark.parametrize("budget", [1, 64, 10_000])
def test_a_step_does_not_depend_on_the_microbatch_budget(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]], budget: int
) -> None:
    results = []
    for some in (30, budget):
        trainer = make_trainer(make_model(), budget=some)
        results.append((trainer.step(batch(make_rows())), weights(trainer)))
    (first, first_weights), (second, second_weights) = results
    assert second.loss == pytest.approx(first.loss, abs=1e-12)
    assert dict(second.metrics) == pytest.approx(dict(first.metrics), rel=1e-10, abs=1e-10)
    for name in first_weights:
        torch.testing.assert_close(second_weights[name], first_weights[name], rtol=0, atol=1e-7)


def test_supervised_training_is_the_same_step_with_advantage_one(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]]
) -> None:
    rows = [replace(row, advantages=[float(m) for m in row.loss_mask]) for row in make_rows()]
    trainer = make_trainer(make_model(), PRESETS["reinforce"], temperature=1.0)
    mean = -sum(map(sum, trainer.score(rows, "policy"))) / sum(row.num_actions for row in rows)
    losses = [trainer.step(batch(rows)).loss for _ in range(8)]
    assert losses[0] == pytest.approx(mean, rel=1e-9)
    assert losses[-1] < losses[0] - 0.1


def test_logprobs_come_back_row_by_row_in_the_given_order(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]]
) -> None:
    trainer, rows = make_trainer(make_model()), make_rows()
    together = trainer.score(rows, "policy")
    for row, values in zip(rows, together, strict=True):
        assert values == pytest.approx(trainer.score([row], "policy")[0], abs=1e-10)
        assert all(value == 0.0 for value, m in zip(values, row.loss_mask, strict=True) if not m)
        assert all(value < 0.0 for value, m in zip(values, row.loss_mask, strict=True) if m)


def test_all_updates_of_a_batch_share_the_proximal_policy_of_its_start(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]]
) -> None:
    rows = make_rows()
    # The same rows twice: refreshed in between, the second update would see ratio 1 again.
    one, two = (make_trainer(make_model(dtype=torch.float32)).step(batch(*[rows] * n)) for n in (1, 2))
    assert one.metrics["policy/ratio_max"] == one.metrics["policy/ratio_min"] == 1.0
    assert two.metrics["policy/ratio_max"] > 1.001
    # The first of several updates is still exactly on policy: with rate 0 the second is too.
    frozen = make_trainer(make_model(dtype=torch.float32), optimizer=replace(OPTIMIZER, learning_rate=0.0))
    still = frozen.step(batch(rows, rows))
    assert still.metrics["policy/ratio_max"] == still.metrics["policy/ratio_min"] == 1.0
    assert frozen.version == 1


def test_several_updates_equal_single_steps_at_the_same_rate(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]]
) -> None:
    rows = make_rows()
    settings = OptimizerSettings(learning_rate=0.01)
    # Without a gate the proximal policy has no say, so two updates are two steps.
    together = make_trainer(make_model(), PRESETS["reinforce"], optimizer=settings)
    together.step(batch(rows[:5], rows[5:]))
    apart = make_trainer(make_model(), PRESETS["reinforce"], optimizer=settings)
    for part in (rows[:5], rows[5:]):
        apart.step(batch(part))
    assert is_same(weights(together), weights(apart))


def test_proximal_behavior_takes_the_ratio_against_the_sampler(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]]
) -> None:
    rows = make_rows()
    trainer = make_trainer(make_model(), resolve("grpo", {"proximal": "behavior"}))
    policy = trainer.score(rows, "policy")
    gaps = [
        sum(b - p for p, b in zip(values, row.behavior_logprobs, strict=True))
        for row, values in zip(rows, policy, strict=True)
    ]
    metrics = trainer.step(batch(rows)).metrics
    assert metrics["policy/kl_old_k1"] == pytest.approx(sum(gaps) / sum(row.num_actions for row in rows), rel=1e-9)
    # The sampler is still compared with the trainer: a gap must not hide behind the choice of proximal policy.
    assert metrics["mismatch/kl_k1"] == pytest.approx(metrics["policy/kl_old_k1"], rel=1e-9)


def test_a_reference_is_scored_by_its_own_weights_and_stays_frozen(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]]
) -> None:
    rows = make_rows()
    objective = resolve("grpo", {"regularizers": [{"name": "kl", "coefficient": 0.1}]})
    reference = make_model(seed=1)
    trainer = make_trainer(make_model(), objective, reference=reference)
    before = {name: p.clone() for name, p in reference.named_parameters()}
    gaps = [
        sum(p - r for p, r in zip(*pair, strict=True))
        for pair in zip(trainer.score(rows, "policy"), trainer.score(rows, "reference"), strict=True)
    ]
    metrics = trainer.step(batch(rows)).metrics
    assert metrics["policy/kl_ref_k1"] == pytest.approx(sum(gaps) / sum(row.num_actions for row in rows), rel=1e-9)
    assert all(torch.equal(before[name], p) and p.grad is None for name, p in reference.named_parameters())
    with pytest.raises(UserError, match="needs a reference model"):
        make_trainer(make_model(), objective).step(batch(rows))


def test_a_non_finite_gradient_changes_nothing_and_names_the_place(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]]
) -> None:
    rows = make_rows()
    trainer = make_trainer(make_model(), budget=1)
    trainer.step(batch(rows))
    before, moments = weights(trainer), {n: t.clone() for n, t in trainer._optimizer.tensors().items()}
    # The packer puts the longest trajectory first: make the third longest the bad one.
    longest = sorted(rows, key=lambda row: (-len(row.token_ids), row.group_id, row.index))
    bad = [replace(row, advantages=[float("inf")] * len(row.advantages)) if row is longest[2] else row for row in rows]
    with pytest.raises(BackendError, match=r"step 2, update 1: .* microbatch \d+ of \d+ .*model\.embed_tokens\.weight"):
        trainer.step(batch(bad))
    assert trainer.version == 1
    assert is_same(before, weights(trainer))
    assert is_same(moments, trainer._optimizer.tensors())
    # And nothing of it is left in the next step.
    clean = make_trainer(make_model(), budget=1)
    for each in (rows, rows):
        clean.step(batch(each))
    trainer.step(batch(rows))
    assert is_same(weights(clean), weights(trainer))


def test_a_parameter_that_is_not_finite_is_found_by_its_name(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]]
) -> None:
    model = make_model()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(BackendError, match=r"step 1, update 1: loss nan, gradient norm nan, from microbatch 1 of"):
        make_trainer(model).step(batch(make_rows()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "tied_llama"])
def test_saved_and_loaded_training_goes_on_to_the_same_bits(
    make_model: Callable[..., Any],
    make_rows: Callable[..., list[Sample]],
    tmp_path: Path,
    dtype: torch.dtype,
    family: str,
) -> None:
    batches = [batch(make_rows(seed=seed)) for seed in range(4)]
    straight = make_trainer(make_model(family, dtype=dtype))
    straight_results = [straight.step(each) for each in batches]

    first = make_trainer(make_model(family, dtype=dtype))
    for each in batches[:2]:
        first.step(each)
    (tmp_path / "saved").mkdir()
    first.save(tmp_path / "saved")
    second = make_trainer(make_model(family, dtype=dtype, seed=5))
    storage = {name: tensor.data_ptr() for name, tensor in second.publish().tensors.items()}
    second.load(tmp_path / "saved")
    assert second.version == 2
    results = [second.step(each) for each in batches[2:]]

    assert is_same(weights(straight), weights(second))
    assert is_same(straight._optimizer.tensors(), second._optimizer.tensors())
    assert [r.metrics for r in results] == [r.metrics for r in straight_results[2:]]
    assert {name: tensor.data_ptr() for name, tensor in second.publish().tensors.items()} == storage


def test_equal_states_are_saved_as_equal_bytes_and_as_an_ordinary_model(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]], tmp_path: Path
) -> None:
    digests = []
    for name in ("one", "two"):
        trainer = make_trainer(make_model(dtype=torch.float32))
        trainer.step(batch(make_rows()))
        (tmp_path / name).mkdir()
        trainer.save(tmp_path / name)
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        digests.append({path.relative_to(tmp_path / name): sha256_of(path) for path in files})
    assert digests[0] == digests[1]
    assert Path("model.safetensors") in digests[0]
    read = load_model(tmp_path / "one", torch.float32, torch.device("cpu"))
    assert is_same(weights(trainer), {name: p.detach() for name, p in read.named_parameters()})


def test_a_checkpoint_of_another_model_is_refused_by_the_first_differing_tensor(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]], tmp_path: Path
) -> None:
    make_trainer(make_model("qwen3", dtype=torch.float32)).save(tmp_path)
    trainer = make_trainer(make_model(dtype=torch.float32))
    before = weights(trainer)
    with pytest.raises(UserError, match=r'another model: tensor ".*k_norm.weight" is \(8,\) there and absent'):
        trainer.load(tmp_path)
    assert is_same(before, weights(trainer))
    with pytest.raises(UserError, match=r"trained in torch.float32 and this run is in torch.bfloat16"):
        make_trainer(make_model("qwen3", dtype=torch.bfloat16)).load(tmp_path)
    with pytest.raises(UserError, match="no training to continue"):
        trainer.load(tmp_path / "trainer")


def test_a_second_trainer_may_take_over_the_model(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]]
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model(dtype=dtype)
        first = make_trainer(model)
        first.step(batch(make_rows()))
        second = make_trainer(model)
        second.step(batch(make_rows()))
        assert second.version == 1
        assert all(p.grad is None for p in model.parameters())


def test_gradient_checkpointing_is_a_setting_that_changes_no_result(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]]
) -> None:
    trainers = [make_trainer(make_model(), gradient_checkpointing=flag) for flag in (False, True)]
    losses = [[trainer.step(batch(make_rows())).loss for _ in range(3)] for trainer in trainers]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
