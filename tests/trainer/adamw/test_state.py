"""Masters and moments: in float32 to the bit those of torch's AdamW, else near them; saved and loaded, training goes on
to the same bits; models learn as well."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from temper.batching.pack import pack
from temper.errors import UserError
from temper.models.tiny import character_tokenizer
from temper.objectives import PRESETS
from temper.trainer.adamw import moments, state
from temper.trainer.adamw.moments import States
from temper.trainer.local import LocalTrainer, TrainerSettings
from temper.trainer.optim import MasterAdamW, OptimizerSettings
from temper.types import Batch, Sample
from tests.fakes.selection import mostly_heavy

EVERY_STATES: tuple[States, ...] = ("float32", "bfloat16", "8bit")
SETTINGS = OptimizerSettings(learning_rate=0.01, weight_decay=0.1, max_grad_norm=0.5)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of tiny models are cut over buckets, and matrices of more than 16 values are held compactly."""
    monkeypatch.setattr(state, "BUCKET_VALUES", 512)
    monkeypatch.setattr(moments, "SMALL_TENSOR", 16)


def make_net(dtype: torch.dtype) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(37, 50), nn.Tanh(), nn.Linear(50, 30), nn.Tanh(), nn.Linear(30, 3)).to(dtype)


def gradients(model: nn.Module, step: int) -> list[list[Tensor]]:
    """Of three microbatches."""
    draw = torch.Generator().manual_seed(step)
    return [[torch.randn(p.shape, generator=draw).to(p.dtype) for p in model.parameters()] for _ in range(3)]


def update(model: nn.Module, optimizer: MasterAdamW, step: int) -> None:
    for microbatch in gradients(model, step):
        with optimizer.collecting():
            torch.stack(
                [(p * g).float().sum() for p, g in zip(model.parameters(), microbatch, strict=True)]
            ).sum().backward()
    optimizer.step(0.01 / step, nn.utils.get_total_norm(list(optimizer.gradients().values())))


@pytest.mark.parametrize("bucket_values", [256, 1 << 25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_float32_moments_and_masters_are_to_the_bit_those_of_torch(
    dtype: torch.dtype, bucket_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "BUCKET_VALUES", bucket_values)
    model, plain = make_net(dtype), make_net(dtype)
    optimizer = MasterAdamW(model, SETTINGS)
    masters = {name: nn.Parameter(p.detach().float()) for name, p in plain.named_parameters()}
    groups = [
        {"params": [m for m in masters.values() if m.ndim > 1], "weight_decay": 0.1},
        {"params": [m for m in masters.values() if m.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, fused=True)
    for step in range(1, 21):
        update(model, optimizer, step)
        for master, *parts in zip(masters.values(), *gradients(plain, step), strict=True):
            master.grad = parts[0].float() + parts[1].float() + parts[2].float()
        nn.utils.clip_grad_norm_(masters.values(), 0.5)
        for group in adamw.param_groups:
            group["lr"] = 0.01 / step
        adamw.step()
    tensors = optimizer.tensors()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, masters[name].to(dtype))
        assert torch.equal(tensors.get(f"master.{name}", parameter), masters[name])
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(tensors[f"{moment}.{name}"], adamw.state[masters[name]][moment])


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("states", EVERY_STATES)
def test_updates_do_not_depend_on_the_size_of_buckets_nor_on_where_the_state_lives(
    states: States, dtype: torch.dtype, offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for bucket_values, is_away in ((1 << 25, False), (256, offload)):
        monkeypatch.setattr(state, "BUCKET_VALUES", bucket_values)
        model = make_net(dtype)
        optimizer = MasterAdamW(model, replace(SETTINGS, states=states, offload=is_away))
        for step in range(1, 5):
            update(model, optimizer, step)
        results.append({**dict(model.named_parameters()), **optimizer.tensors()})
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_another_seed_rounds_otherwise_and_the_same_one_alike() -> None:
    found = []
    for seed in (1, 1, 2):
        model = make_net(torch.float32)
        optimizer = MasterAdamW(model, replace(SETTINGS, states="bfloat16", noise_seed=seed))
        update(model, optimizer, 1)
        found.append(optimizer.tensors()["exp_avg_sq.0.weight"])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_a_gradient_is_dropped_before_the_next_arrives() -> None:
    """Held until the end of the backward pass, those of all parameters would be a second copy of the gradient."""
    model = make_net(torch.bfloat16)
    optimizer = MasterAdamW(model, SETTINGS)
    collect, held = optimizer._collect, []

    def counting(name: str, parameter: Tensor) -> None:
        held.append(sum(p.grad is not None for p in model.parameters()))
        collect(name, parameter)

    optimizer._collect = counting  # type: ignore[method-assign]
    with optimizer.collecting():
        model(torch.ones(2, 37, dtype=torch.bfloat16)).sum().backward()
    assert held == [1] * 6
    assert all(parameter.grad is None for parameter in model.parameters())
    model(torch.ones(2, 37, dtype=torch.bfloat16)).sum().backward()
    assert len(held) == 6, "outside of collecting() gradients are left alone"


class LargestStorage(TorchDispatchMode):
    """Bytes of the largest memory that was taken under it."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self._known:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("states", EVERY_STATES)
def test_no_temporary_tensor_of_an_update_is_larger_than_a_bucket(states: States, dtype: torch.dtype) -> None:
    model = make_net(dtype)
    optimizer = MasterAdamW(model, replace(SETTINGS, states=states))
    update(model, optimizer, 1)
    gradients = optimizer.gradients().values()
    homes = [tensor for home in optimizer._state._residence().homes() for tensor in home.values()]
    with LargestStorage([*model.parameters(), *gradients, *homes]) as largest:
        optimizer.step(0.01, torch.ones(()))
    assert 0 < largest.bytes <= 512 * 4 < 50 * 37 * 4, "the largest matrix is larger"


def make_trainer(model: Any, recomputes: bool = False, **changed: Any) -> LocalTrainer:
    optimizer = OptimizerSettings(**{"learning_rate": 0.01, "noise_seed": 5, **changed})
    settings = TrainerSettings(optimizer=optimizer, temperature=1.0, total_steps=100, gradient_checkpointing=recomputes)
    dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    packing = partial(pack, tokens_per_microbatch=40, dtype=dtype)
    return LocalTrainer(model, character_tokenizer("abc"), PRESETS["reinforce"], settings, pack=packing)


def to_imitate(rows: list[Sample]) -> Batch:
    return Batch(updates=(tuple(replace(row, advantages=[float(m) for m in row.loss_mask]) for row in rows),))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", mostly_heavy([torch.float32, torch.bfloat16, torch.float16], keep=(torch.bfloat16,)))
@pytest.mark.parametrize("states", EVERY_STATES)
def test_a_resumed_trainer_ends_with_the_same_bits(
    make_model: Callable[..., Any],
    make_rows: Callable[..., list[Sample]],
    tmp_path: Path,
    states: States,
    dtype: torch.dtype,
    offload: bool,
) -> None:
    through = make_trainer(make_model(dtype=dtype), states=states, offload=offload)
    batches = [to_imitate(make_rows(seed=seed)) for seed in range(5)]
    for batch in batches[:3]:
        through.step(batch)
    through.save(tmp_path)
    # Where the state lives is no part of it: a run may be resumed with or without offloading.
    resumed = make_trainer(make_model(dtype=dtype, seed=9), states=states, offload=not offload)
    resumed.load(tmp_path)
    for trainer in (through, resumed):
        for batch in batches[3:]:
            trainer.step(batch)
    first, second = ({**trainer.publish().tensors, **trainer._optimizer.tensors()} for trainer in (through, resumed))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    kinds = {"float32": {torch.float32}, "bfloat16": {torch.float32, torch.bfloat16}}
    kinds["8bit"] = {torch.float32, torch.int8, torch.uint8}
    held = {tensor.dtype for name, tensor in through._optimizer.tensors().items() if name.startswith("exp_avg")}
    assert held == kinds[states]


def test_gradients_are_collected_alike_when_layers_are_recomputed(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]]
) -> None:
    found = []
    for recomputes in (False, True):
        trainer = make_trainer(make_model(dtype=torch.bfloat16), recomputes=recomputes)
        trainer.step(to_imitate(make_rows()))
        found.append(dict(trainer._optimizer.tensors()))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_count_of_steps_that_was_lost_would_round_otherwise(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]], tmp_path: Path
) -> None:
    """The mutation of the test above: random bits that begin anew after a resume."""
    found = []
    for forgets in (False, True):
        trainer = make_trainer(make_model(dtype=torch.float32), states="bfloat16", learning_rate=0.0)
        trainer.step(to_imitate(make_rows()))
        if forgets:
            trainer._optimizer._num_steps = 7
        trainer.step(to_imitate(make_rows()))
        found.append(trainer._optimizer.tensors()["exp_avg_sq.model.embed_tokens.weight"])
    assert not torch.equal(*found)


def test_a_checkpoint_with_other_states_is_refused_before_anything_changes() -> None:
    model = make_net(torch.float32)
    optimizer = MasterAdamW(model, replace(SETTINGS, states="8bit"))
    update(model, optimizer, 1)
    other = MasterAdamW(model, SETTINGS)
    update(model, other, 1)
    before = {name: tensor.clone() for name, tensor in other.tensors().items()}
    with pytest.raises(UserError, match=r'held in 8bit and those of this run in float32\. Set optim\.states = "8bit"'):
        other.load_tensors(optimizer.tensors(), 1)
    assert all(torch.equal(before[name], tensor) for name, tensor in other.tensors().items())
    with pytest.raises(UserError, match="held in float32 and those of this run in 8bit"):
        optimizer.load_tensors(other.tensors(), 1)


def test_forgotten_moments_leave_masters_alone() -> None:
    model = make_net(torch.bfloat16)
    optimizer = MasterAdamW(model, replace(SETTINGS, states="8bit"))
    update(model, optimizer, 1)
    masters = {name: tensor.clone() for name, tensor in optimizer.tensors().items() if name.startswith("master.")}
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters.values())
    optimizer.reset()
    assert optimizer.num_steps == 0
    assert optimizer.tensors().keys() == masters.keys()
    assert all(torch.equal(optimizer.tensors()[name], masters[name]) for name in masters)
    assert all(
        not tensor.any()
        for home in optimizer._state._residence().homes()
        for name, tensor in home.items()
        if name != "remainder"
    )


def test_a_state_without_steps_makes_an_optimiser_forget_its_own() -> None:
    found = []
    for used in (False, True):
        model = make_net(torch.bfloat16)
        optimizer = MasterAdamW(model, replace(SETTINGS, states="bfloat16"))
        start = dict(optimizer.tensors())
        if used:
            update(model, optimizer, 1)
        optimizer.load_tensors(start, 0)
        update(model, optimizer, 2)
        found.append(dict(optimizer.tensors()))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def quadratic_loss(states: States, steps: int = 600) -> float:
    """Mean of a_i (w_i - t_i)^2 with noisy gradients, over four powers of ten of a_i, with beta2 = 0.999."""
    draw = torch.Generator().manual_seed(0)
    target = torch.randn(64, 64, generator=draw)
    curvature = 10 ** (4 * torch.rand(64, 64, generator=draw) - 2)
    model = nn.Linear(64, 64, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = MasterAdamW(model, OptimizerSettings(learning_rate=0.02, max_grad_norm=1e9, states=states))
    for step in range(steps):
        noise = 0.1 * torch.randn(64, 64, generator=draw)
        model.weight.grad = curvature * (model.weight.detach() - target + noise)
        optimizer.step(0.02 * (1 - step / steps), torch.ones(()))
    return float((curvature * (model.weight.detach() - target).square()).mean())


def test_compact_moments_solve_a_quadratic_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "BUCKET_VALUES", 1 << 25)
    wide = quadratic_loss("float32")
    assert wide < 0.02, "it starts at about 10"
    assert quadratic_loss("bfloat16") == pytest.approx(wide, rel=0.1)
    assert quadratic_loss("8bit") == pytest.approx(wide, rel=0.1)


@pytest.mark.heavy
def test_a_model_learns_as_well_with_compact_moments(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "BUCKET_VALUES", 1 << 25)
    losses = {}
    for states in EVERY_STATES:
        trainer = make_trainer(make_model(dtype=torch.float32), states=states)
        losses[states] = [trainer.step(to_imitate(make_rows())).loss for _ in range(25)]
    assert losses["float32"][-1] < 0.5 * losses["float32"][0]
    assert losses["bfloat16"][-1] == pytest.approx(losses["float32"][-1], rel=0.02)
    assert losses["8bit"][-1] == pytest.approx(losses["float32"][-1], rel=0.05)


def mean_second_moment(states: States) -> float:
    """After 20 steps with gradients of about 1 and 600 with a tenth of that."""
    model = nn.Linear(64, 64, bias=False)
    optimizer = MasterAdamW(model, OptimizerSettings(learning_rate=0.0, max_grad_norm=1e9, states=states))
    for step in range(620):
        model.weight.grad = torch.linspace(0.5, 1.5, 4096).view(64, 64) * (1.0 if step < 20 else 0.1)
        optimizer.step(0.0, torch.ones(()))
    return float(optimizer.tensors()["exp_avg_sq.weight"].float().mean())


def test_second_moments_shrink_with_the_gradients_which_rounding_to_the_nearest_would_prevent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state, "BUCKET_VALUES", 1 << 25)
    wide = mean_second_moment("float32")
    assert mean_second_moment("bfloat16") == pytest.approx(wide, rel=0.02)
    half = torch.full((4096,), 0x8000, dtype=torch.int32)
    monkeypatch.setattr(state, "random_bits", lambda key, first, count, device: half | (half << 16))
    assert mean_second_moment("bfloat16") > 1.2 * wide, "the mutation"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU has nowhere to offload to")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("states", EVERY_STATES)
def test_on_a_gpu_offloaded_state_gives_the_same_bits_and_comes_back_from_a_checkpoint(
    states: States, dtype: torch.dtype
) -> None:
    def run(offload: bool, steps: Iterable[int], tensors: Any = None) -> dict[str, Tensor]:
        model = make_net(dtype).cuda()
        optimizer = MasterAdamW(model, replace(SETTINGS, states=states, offload=offload))
        if tensors is not None:
            model.load_state_dict({name: tensors[name] for name in model.state_dict()})
            optimizer.load_tensors({name: t for name, t in tensors.items() if name not in model.state_dict()}, 5)
        for step in steps:
            for name, gradient in optimizer.gradients().items():
                draw = torch.Generator().manual_seed(step + len(name))
                gradient.copy_(torch.randn(gradient.shape, generator=draw))
            optimizer.step(0.01, nn.utils.get_total_norm(list(optimizer.gradients().values())))
        return {**{n: p.detach().cpu() for n, p in model.named_parameters()}, **optimizer.tensors()}

    here, away = run(False, range(1, 11)), run(True, range(1, 11))
    resumed = run(True, range(6, 11), run(True, range(1, 6)))
    assert all(torch.equal(here[name], away[name]) for name in here)
    assert all(torch.equal(here[name], resumed[name]) for name in here)
