"""Bytes per parameter: in closed form, and as what an optimiser really holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from temper.trainer.adamw.footprint import bytes_per_parameter
from temper.trainer.optim import MasterAdamW, OptimizerSettings


@pytest.mark.parametrize(
    ("states", "device", "moments"), [("float32", 16, 8), ("bfloat16", 12, 4), ("8bit", 10.03125, 2.03125)]
)
def test_bytes_per_parameter_of_bfloat16_weights(states: str, device: float, moments: float) -> None:
    held = bytes_per_parameter(states)  # type: ignore[arg-type]
    assert (held.weights, held.gradients, held.masters, held.moments) == (2, 4, 2, moments)
    assert (held.device, held.host) == (device, 0)
    away = bytes_per_parameter(states, offload=True)  # type: ignore[arg-type]
    assert (away.device, away.host) == (6, 2 + moments)


def test_float32_weights_are_their_own_masters() -> None:
    held = bytes_per_parameter("float32", dtype=torch.float32)
    assert (held.weights, held.gradients, held.masters, held.device) == (4, 4, 0, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("states", ["float32", "bfloat16", "8bit"])
def test_the_sum_is_what_an_optimiser_holds(states: str, dtype: torch.dtype) -> None:
    model = nn.Linear(256, 256, bias=False).to(dtype)
    optimizer = MasterAdamW(model, OptimizerSettings(learning_rate=0.1, states=states))  # type: ignore[arg-type]
    with optimizer.collecting():
        model(torch.ones(1, 256, dtype=dtype)).sum().backward()
    gradients = sum(g.nbytes for g in optimizer.gradients().values())
    grads = 0 if model.weight.grad is None else model.weight.grad.nbytes
    assert max(gradients, grads) == gradients, "no gradient is held beside the sum"
    optimizer.step(0.1, torch.ones(()))
    residence = optimizer._state._made
    assert residence is not None
    state = sum(tensor.nbytes for home in residence.homes() for tensor in home.values())
    expected = bytes_per_parameter(states, dtype=dtype)  # type: ignore[arg-type]
    assert gradients == expected.gradients * model.weight.numel()
    assert state == (expected.masters + expected.moments) * model.weight.numel()
    assert model.weight.nbytes == expected.weights * model.weight.numel()
