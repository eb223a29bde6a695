"""Schedules in closed form, AdamW against its equations, master weights that small updates do move."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from temper.errors import UserError
from temper.trainer.adamw import state
from temper.trainer.optim import MasterAdamW, OptimizerSettings, learning_rate_at


def rates(total_steps: int, **settings: object) -> list[float]:
    made = OptimizerSettings(learning_rate=1.0, **settings)  # type: ignore[arg-type]
    return [learning_rate_at(made, step, total_steps) for step in range(1, total_steps + 1)]


def test_schedules_in_closed_form() -> None:
    assert rates(4) == [1, 1, 1, 1]
    assert rates(4, schedule="linear") == [1, 0.75, 0.5, 0.25]
    assert rates(6, schedule="linear", warmup_steps=2) == [0.5, 1, 1, 0.75, 0.5, 0.25]
    assert rates(4, schedule="cosine") == pytest.approx([1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2])
    assert rates(3, schedule="cosine", warmup_steps=3) == pytest.approx([1 / 3, 2 / 3, 1])
    assert rates(10, schedule="wsd") == pytest.approx([1] * 9 + [0.5])
    assert rates(12, schedule="wsd", warmup_steps=2) == pytest.approx([0.5] + [1] * 10 + [0.5])


def test_no_schedule_wastes_a_step_at_rate_zero_or_rises_after_the_end() -> None:
    for schedule in ("constant", "linear", "cosine", "wsd"):
        assert min(rates(7, schedule=schedule, warmup_steps=3)) > 0
        settings = OptimizerSettings(learning_rate=1.0, schedule=schedule)  # type: ignore[arg-type]
        assert learning_rate_at(settings, 100, 10) <= learning_rate_at(settings, 10, 10)


def one_weight(value: float, dtype: torch.dtype, **settings: object) -> tuple[nn.Module, MasterAdamW]:
    model = nn.Linear(1, 1, bias=True)
    nn.init.constant_(model.weight, value)
    nn.init.constant_(model.bias, value)
    model = model.to(dtype)
    return model, MasterAdamW(model, OptimizerSettings(learning_rate=0.1, **settings))  # type: ignore[arg-type]


def update(model: nn.Module, optimizer: MasterAdamW, gradient: float, rate: float) -> None:
    loss = sum(parameter.sum() * gradient for parameter in model.parameters())
    with optimizer.collecting():
        loss.backward()  # type: ignore[union-attr]
    norm = nn.utils.get_total_norm(list(optimizer.gradients().values()))
    optimizer.step(rate, norm)


def test_two_steps_follow_the_equations_of_adamw() -> None:
    model, optimizer = one_weight(2.0, torch.float64, weight_decay=0.5, max_grad_norm=1e9)
    weight, bias, mean, square = 2.0, 2.0, 0.0, 0.0
    for step, (gradient, rate) in enumerate([(3.0, 0.1), (-1.0, 0.05)], start=1):
        update(model, optimizer, gradient, rate)
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        move = rate * (mean / (1 - 0.9**step)) / (math.sqrt(square / (1 - 0.999**step)) + 1e-8)
        weight, bias = weight * (1 - rate * 0.5) - move, bias - move  # a bias is never decayed
    assert model.weight.item() == pytest.approx(weight, rel=1e-12)  # type: ignore[union-attr]
    assert model.bias.item() == pytest.approx(bias, rel=1e-12)  # type: ignore[union-attr]


def test_clipping_scales_by_the_global_norm() -> None:
    model, optimizer = one_weight(1.0, torch.float64, max_grad_norm=0.5)
    update(model, optimizer, 3.0, 0.1)
    # Two gradients of 3 have norm sqrt(18); clipped to 0.5 each is 0.5 / sqrt(2). The first moment holds a tenth of it.
    assert optimizer.tensors()["exp_avg.weight"].item() == pytest.approx(0.05 / math.sqrt(2), rel=1e-5)


@pytest.mark.heavy
def test_master_weights_collect_updates_too_small_for_bfloat16() -> None:
    model, optimizer = one_weight(1.0, torch.bfloat16)
    plain = model.weight.detach().clone()  # type: ignore[union-attr, operator]
    for num_updates, rounded in ((1000, 1.0), (1500, 0.99609375)):
        for _ in range(num_updates):
            update(model, optimizer, 1.0, rate=1e-6)  # Adam's step is the rate: 1e-6 of the weight
            plain -= 1e-6
        moved = optimizer.num_steps * 1e-6
        assert optimizer.tensors()["master.weight"].item() == pytest.approx(1 - moved, abs=moved / 50)
        assert model.weight.item() == rounded  # type: ignore[union-attr, operator]
    assert plain.item() == 1.0  # without a master nothing would ever have happened
    assert model.weight.dtype == torch.bfloat16  # type: ignore[union-attr]


def test_bfloat16_gradients_add_up_in_float32() -> None:
    model, optimizer = one_weight(1.0, torch.bfloat16)
    for gradient in [1.0] + [2**-10] * 8:
        with optimizer.collecting():
            (model.weight.sum() * gradient).backward()  # type: ignore[union-attr, operator]
    assert optimizer.gradients()["weight"].item() == 1 + 8 * 2**-10  # in bfloat16 it would still be 1
    assert model.weight.grad is None


def test_float32_parameters_are_their_own_masters() -> None:
    _, optimizer = one_weight(1.0, torch.float32)
    assert optimizer.tensors() == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_round_trips_exactly(dtype: torch.dtype) -> None:
    model, optimizer = one_weight(1.0, dtype)
    for gradient in (0.3, -0.7, 0.2):
        update(model, optimizer, gradient, 0.01)
    other_model, other = one_weight(5.0, dtype)
    other_model.load_state_dict(model.state_dict())
    other.load_tensors({name: tensor.clone() for name, tensor in optimizer.tensors().items()}, optimizer.num_steps)
    for each in ((model, optimizer), (other_model, other)):
        update(*each, 0.4, 0.01)
    assert other.num_steps == optimizer.num_steps == 4
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other_model.parameters(), strict=True))
    assert all(torch.equal(tensor, other.tensors()[name]) for name, tensor in optimizer.tensors().items())


def test_state_of_another_model_is_refused_by_name() -> None:
    _, optimizer = one_weight(1.0, torch.bfloat16)
    with pytest.raises(UserError, match=r'"master.bias" is absent there and \(1,\) in the model'):
        optimizer.load_tensors({"master.weight": torch.ones(1, 1)}, 0)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_norms_after_clipping_and_of_the_update_are_those_of_a_copy_compared(decay: float) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).double()
        settings = OptimizerSettings(learning_rate=0.1, weight_decay=decay, max_grad_norm=0.5)
        optimizer = MasterAdamW(model, settings)
        for rate, scale in ((0.1, 1.0), (0.02, 50.0), (0.0, 1.0), (0.05, 1e-3)):
            with optimizer.collecting():
                (model(torch.randn(4, 5).double()).square().sum() * scale).backward()
            gradients = list(optimizer.gradients().values())
            norm = nn.utils.get_total_norm(gradients)
            before = [parameter.detach().clone() for parameter in model.parameters()]
            clipped, ratio = optimizer.step(rate, norm).tolist()
            moved = [new.detach() - old for new, old in zip(model.parameters(), before, strict=True)]
            expected = nn.utils.get_total_norm(moved) / nn.utils.get_total_norm(before)
            assert ratio == pytest.approx(float(expected), rel=1e-9, abs=1e-15)
            assert clipped == pytest.approx(min(float(norm), 0.5), rel=1e-5)
    assert clipped < 0.5  # the last gradient was small and passed as it was


def test_the_norm_of_the_update_is_that_of_the_masters_where_bfloat16_would_not_move() -> None:
    _, optimizer = one_weight(1.0, torch.bfloat16)
    for gradient in optimizer.gradients().values():
        gradient.fill_(1.0)
    assert optimizer.step(1e-6, torch.tensor(2.0**0.5)).tolist()[1] == pytest.approx(1e-6, rel=1e-4)


def masters_of(model: nn.Module, optimizer: MasterAdamW) -> torch.Tensor:
    tensors = optimizer.tensors()
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return torch.cat([tensors.get(f"master.{name}", own[name]).flatten().clone() for name in own])


@pytest.mark.parametrize("bucket_values", [256, 1 << 25])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_size_of_an_update_is_that_of_the_masters_change(
    dtype: torch.dtype, bucket_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many tensors are looked at together."""
    monkeypatch.setattr(state, "BUCKET_VALUES", bucket_values)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(dtype)
    optimizer = MasterAdamW(model, OptimizerSettings(learning_rate=0.1, weight_decay=0.3))
    for rate in (0.1, 0.02):
        before = masters_of(model, optimizer)
        with optimizer.collecting():
            model(torch.randn(4, 5, dtype=dtype)).square().sum().backward()
        norm = nn.utils.get_total_norm(list(optimizer.gradients().values()))
        _, ratio = optimizer.step(rate, norm)
        after = masters_of(model, optimizer)
        assert float(ratio) == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-5)
