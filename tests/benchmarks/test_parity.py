"""At shapes that no constant was fitted to, honest rounding passes and every planted fault is caught."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from temper.parity import check
from temper.parity.budgets import DepthAndWidth, budget_of

FOLDER = Path(__file__).parents[2] / "benchmarks"
FRESH = [("3x128", "bfloat16"), ("5x64", "float32")]
"""Neither is among the shapes of the fit."""
NAMES = [
    "temperature 1.3", "top-p 0.8, trainer not told", "not renormalised", "BOS in front", "first token twice",
    "first token lost", "lost boundaries", "rotary theta", "one number of one tensor", "one layer, not looked at",
    "stale head", "sampler's head in half precision", "trainer's head in half precision", "NaN", "two at once",
]  # fmt: skip


@pytest.fixture(scope="module")
def parity() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        import parity

        # A larger second look, as a run has it, takes minutes here and sees the same.
        patch.setattr(check, "SECOND_LOOK", 2)
        yield parity


@pytest.fixture(scope="module", params=FRESH, ids=lambda fresh: f"{fresh[0]} {fresh[1]}")
def pair(request: pytest.FixtureRequest, parity: ModuleType) -> Any:
    shape, dtype = request.param
    layers, width = map(int, shape.split("x"))
    assert shape not in parity.SMALL
    model = parity.make_model(shape, getattr(torch, dtype))
    # As large as trained ones: with weights of 0.02 so narrow a model hardly looks at its context.
    with torch.no_grad():
        for linear in (m for m in model.get_decoder().layers.modules() if isinstance(m, torch.nn.Linear)):
            linear.weight.mul_(6)
    return shape, parity.make_pair(
        model, budget_of("llama", dtype, "local", "fast", DepthAndWidth(num_layers=layers, width=width))
    )


def test_honest_rounding_keeps_half_the_budget(parity: ModuleType, pair: Any) -> None:
    shape, sound = pair
    agreement = parity.measure(shape, sound, count=8)
    assert agreement.mean_gap <= sound.sides.budget.mean_gap / 2
    assert agreement.max_gap <= sound.sides.budget.max_gap


@pytest.mark.parametrize("fault", NAMES)
def test_a_planted_fault_is_caught(parity: ModuleType, pair: Any, fault: str) -> None:
    shape, sound = pair
    assert parity.catch(shape, sound, fault) is not None


def test_every_fault_of_the_benchmark_is_planted_here(parity: ModuleType) -> None:
    assert list(parity.FAULTS) == NAMES


def test_a_sound_pair_is_not_caught(parity: ModuleType, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, sound = pair
    monkeypatch.setitem(parity.FAULTS, "none", lambda pair: iter([pair.sides]))
    assert parity.catch(shape, sound, "none") is None
