"""Which weights an adapter is put on.

Owns: names of targets, and names of weights in a model with and without adapter. Refuses: putting it on (wrapping.py).
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from temper.errors import UserError, did_you_mean
from temper.models.experts.routing import EXPERT_FAMILIES
from temper.models.families import experts_of, idle_experts
from temper.models.lora.low_rank import is_adapted, weight_name
from temper.models.nf4.layers import FourBitLinear

EXPERTS = "experts"
"""The target that is no linear layer: the matrices of all experts, gate and up as one, and down."""
EXPERT_WEIGHTS = ("mlp.experts.down_proj", "mlp.experts.gate_up_proj")
"""Parameters that it stands for, as peft's target_parameters names them."""


def adapted_weights(model: nn.Module) -> dict[str, Any]:
    """The layer of each adapted weight, under the weight's name in the model without adapter."""
    named = ((plain_name(f"{name}."), module) for name, module in model.named_modules() if is_adapted(module))
    return {name + weight_name(module): module for name, module in named}


def plain_name(name: str) -> str:
    """Without the layers of adapters that lie around."""
    return re.sub(r"\bbase_layer\.", "", name)


def weights_to_adapt(model: Any, names: tuple[str, ...]) -> set[str]:
    """Full names of the weights to adapt: of linear layers of the decoder, so neither embeddings nor head, but routers,
    and of experts where they are asked for."""
    inside = set(model.get_decoder().modules())
    kinds = (nn.Linear, FourBitLinear)
    text = model.config.get_text_config()
    scored = _scored_experts(text)
    linears = {
        name
        for name, module in model.named_modules()
        if type(module) in kinds and module in inside and not _is_router(name, module, scored)
    }
    known = {name.rpartition(".")[2] for name in linears}
    family = text.model_type
    is_known = family in EXPERT_FAMILIES
    experts = {name for name, _ in model.named_parameters() if is_known and name.endswith(EXPERT_WEIGHTS)}
    if EXPERTS in names and not experts:
        raise UserError(
            f'model.lora: targets has "{EXPERTS}", which is made for the families {", ".join(EXPERT_FAMILIES)}, and '
            f"this model is a {family}. Its linear layers are {', '.join(sorted(known))}"
        )
    known |= {EXPERTS} if experts else set()
    for name in names:
        if name not in known:
            raise UserError(
                f'model.lora: targets has "{name}", and the linear layers of {type(model).__name__} are '
                f"{', '.join(sorted(known))}.{did_you_mean(name, known)}"
            )
    chosen = {f"{name}.weight" for name in linears if not names or name.rpartition(".")[2] in names}
    return chosen | experts if EXPERTS in names else chosen


def _scored_experts(text: Any) -> int:
    """Outputs of a router, of a text configuration; 0: it has none."""
    settings = text.to_dict()
    num_experts, _ = experts_of(settings)
    return num_experts + idle_experts(settings)


def _is_router(name: str, linear: Any, scored: int) -> bool:
    """Whether it scores experts: most families' routers are no linear layers, those of AFMoE, Aria, HunYuan and LongCat
    are. Its name alone does not say so: a feed-forward part may call a matrix "gate"."""
    return linear.out_features == scored and bool({"gate", "router"} & set(name.split(".")))
