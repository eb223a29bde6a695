"""Inputs that wait on the host: what comes back is what was sent, in time, and nothing is kept for longer."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from temper.models.long_rows import host
from temper.models.long_rows.host import HostInputs
from temper.trainer.passes.forward import enable_checkpointing
from tests.fakes.models import make_family_model
from tests.fakes.movers import FakeMover


@pytest.fixture(autouse=True)
def _small_tensors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "LEAST_BYTES", 64)


def layer(hidden: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.sin(hidden @ weight), residual + hidden


def gradient(recompute: Callable[..., Any] | None, depth: int = 4) -> Tensor:
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    parameter = torch.nn.Parameter(weight.detach())
    hidden = residual = torch.ones(16, 8) * weight[0]
    for _ in range(depth):
        arguments = (layer, hidden, residual, parameter)
        hidden, residual = arguments[0](*arguments[1:]) if recompute is None else recompute(*arguments)
    (hidden + residual).sum().backward()
    assert parameter.grad is not None
    return parameter.grad


def test_gradients_are_those_of_layers_that_keep_everything() -> None:
    mover = FakeMover()
    assert torch.equal(gradient(HostInputs(mover).recompute), gradient(None))
    assert sum(event.startswith("send") for event in mover.events) == 2 * 4, "two inputs a layer, never the weight"


def test_an_input_that_comes_back_changed_is_seen() -> None:
    mover = FakeMover(lambda tensor: tensor * 1.01)
    assert not torch.allclose(gradient(HostInputs(mover).recompute), gradient(None))


def test_the_layer_before_is_on_its_way_while_one_is_used() -> None:
    mover = FakeMover()
    gradient(HostInputs(mover).recompute)
    for number in range(6):
        first_use = min(mover.events.index(f"use {later}") for later in (number + 1, number + 2))
        assert mover.events.index(f"bring {number}") < mover.events.index(f"use {number}")
        if number % 2 == 1:  # the second input of a layer, while the next layer's first one is used
            assert mover.events.index(f"bring {number}") < first_use
    assert len(mover.events) == len(set(mover.events)), "each tensor goes and comes once"


def test_a_pass_that_is_given_up_keeps_nothing() -> None:
    inputs = HostInputs(FakeMover())
    start = torch.ones(16, 8, requires_grad=True)
    kept = inputs.recompute(layer, start, start, torch.ones(8, 8))
    last = inputs._last
    assert last is not None
    assert last() is not None
    del kept
    gc.collect()
    assert last() is None


def test_small_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "LEAST_BYTES", 1 << 20)
    mover = FakeMover()
    gradient(HostInputs(mover).recompute)
    assert mover.events == []


def test_on_a_cpu_nothing_is_copied() -> None:
    model = make_family_model("llama")
    enable_checkpointing(model, "offload")
    for module in model.model.layers:
        assert not hasattr(module._gradient_checkpointing_func, "__self__"), "torch's own way"
