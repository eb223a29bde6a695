"""What is not made for experts is refused by name, and says what to use."""

from __future__ import annotations

import pytest
import torch

from temper.engine.sampler_model import sampler_model
from temper.errors import UserError
from temper.models.nf4.holding import hold_in_four_bits
from tests.models.experts.test_bias import make_glm
from tests.models.experts.test_routes import make_model


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_samplers_in_float8_are_refused(runs_ahead: bool) -> None:
    with pytest.raises(UserError, match=r'engine.weights="fp8" .* this model is a qwen3_moe. Use .* "model"'):
        sampler_model(make_model("fast"), weights="fp8", runs_ahead=runs_ahead)
    with pytest.raises(UserError, match="this model is a glm4_moe"):
        sampler_model(make_glm(), weights="fp8", runs_ahead=runs_ahead)


def test_bases_in_four_bits_are_refused_before_anything_of_them_changes() -> None:
    model = make_model("fast")
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(UserError, match=r'model.lora.base="4bit" .* this model is a qwen3_moe. Use base = "full"'):
        hold_in_four_bits(model, torch.device("cpu"))
    assert [type(module) for module in model.modules()] == kinds
