"""Without targets an adapter goes where it is documented, in every family with experts that was tried."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from temper.errors import UserError
from temper.models.families import TABLE, experts_of, idle_experts
from temper.models.lora.targets import weights_to_adapt

UNSET: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": [2, 1, 2, 1], "head_dim": 128},
}
"""What the defaults of a family leave open."""


def made(family: str) -> Any:
    """Four layers of the family's own model, without numbers."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family, num_hidden_layers=4, pad_token_id=0, **UNSET.get(family, {}))
        )


def families_with_experts() -> list[str]:
    tried = json.loads(TABLE.read_text())["tried"]
    return [name for name in tried if name in UNSET or experts_of(AutoConfig.for_model(name).to_dict())[0]]


@pytest.mark.parametrize("family", families_with_experts())
def test_no_router_is_adapted(family: str) -> None:
    """A matrix with an output for each expert is a router, whatever it is called; queries are adapted."""
    model = made(family)
    settings = model.config.to_dict()
    routed = experts_of(settings)[0] + idle_experts(settings)
    assert routed > 1
    sizes = {name: weight.shape for name, weight in model.named_parameters()}
    assert routed in {shape[0] for shape in sizes.values() if len(shape) == 2}, "there are routers"
    adapted = weights_to_adapt(model, ())
    assert [name for name in adapted if sizes[name][0] == routed] == []
    assert any(".q_" in name for name in adapted)


@pytest.mark.parametrize(
    ("family", "router"),
    [("afmoe", "gate"), ("aria_text", "router"), ("hunyuan_v1_moe", "wg"), ("longcat_flash", "classifier")],
)
def test_a_router_that_is_named_is_no_target(family: str, router: str) -> None:
    with pytest.raises(UserError, match=f'targets has "{router}", and the linear layers of'):
        weights_to_adapt(made(family), ("q_proj", router) if family != "longcat_flash" else (router,))


def test_a_gate_that_scores_no_experts_is_adapted() -> None:
    """A family that is not known yet may call a part of attention so."""
    model = made("olmoe")
    with torch.device("meta"):
        model.model.layers[0].self_attn.gate = nn.Linear(model.config.hidden_size, 16)
    assert weights_to_adapt(model, ("gate",)) == {"model.layers.0.self_attn.gate.weight"}


def test_a_feed_forward_part_that_is_called_a_gate_is_adapted() -> None:
    """AFMoE's attention has a gate, and its shared experts have one."""
    adapted = weights_to_adapt(made("afmoe"), ("gate_proj",))
    assert {"model.layers.3.self_attn.gate_proj.weight", "model.layers.3.mlp.shared_experts.gate_proj.weight"} < adapted
