"""Which experts a mixture-of-experts model chose, and how likely its routers thought them.

Owns: reading router logits out of a forward pass. Refuses: dense models, and what a change of routes means for the loss
(objectives/policy/ratios.py).
Shapes: _T packed tokens, _D width, _E experts, _L layers with a router, _K experts chosen at a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from temper.errors import UserError
from temper.models.attention_interface import Attend
from temper.models.decoder import can_walk
from temper.models.experts.routing import Routes, has_experts
from temper.models.states import hidden_states

SOFTMAX_ROUTERS = ("flex_olmo", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""Families (model_type) that choose the top of a softmax over the experts. Others score by sigmoid, add a bias or
choose groups first: the top of a softmax would name experts that never worked."""


def hidden_and_router_logits(
    model: Any, token_ids_T: Tensor, positions_T: Tensor, attend: Attend, inner: Routes | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Last hidden states [T, D] of packed tokens, and logits [T, E] of every router, first layer first.

    inner: who else is told of the routers' choice, and may replace it.
    """
    text = model.config.get_text_config()
    if hasattr(text, "num_experts_per_tok"):
        require_softmax_routers(text, "rspo")
    if can_walk(model) and has_experts(model):
        seen = _SeenLogits(inner)
        return hidden_states(model, token_ids_T, positions_T, attend, seen), tuple(seen.by_layer.values())
    output = model.get_decoder()(
        input_ids=token_ids_T.unsqueeze(0),
        position_ids=positions_T.unsqueeze(0),
        use_cache=False,
        attend=attend,
        output_router_logits=True,
    )
    # Transformers hooks the routers it knows of; a dense model's output has no such field at all.
    recorded = getattr(output, "router_logits", None)
    if not recorded:
        raise UserError(
            f"objective rspo needs a mixture-of-experts model; {type(model).__name__} has no router. Choose an "
            f"objective without router factor, such as gmpo, or a model such as Qwen3-MoE, Mixtral or OLMoE"
        )
    return output.last_hidden_state[0], tuple(logits.flatten(0, -2) for logits in recorded)


def require_softmax_routers(config: Any, objective: str) -> None:
    """UserError for a model, by its description, whose routers this objective cannot compare."""
    if not hasattr(config, "num_experts_per_tok"):
        raise UserError(
            f"objective {objective} needs a mixture-of-experts model, and a {config.model_type} has no router. Choose "
            f"an objective without router factor, such as gmpo, or a model such as Qwen3-MoE, Mixtral or OLMoE"
        )
    if config.model_type not in SOFTMAX_ROUTERS:
        raise UserError(
            f"objective {objective}: how {config.model_type} chooses its experts is not known to Temper, which can "
            f"compare the routers of {', '.join(SOFTMAX_ROUTERS)}. Choose one of them, or an objective without router "
            f"factor"
        )


class _SeenLogits:
    """A Routes that looks. By layer: one that is computed again says the same."""

    def __init__(self, inner: Routes | None) -> None:
        self._inner = inner
        self.by_layer: dict[int, Tensor] = {}

    def route(self, layer: int, logits_TE: Tensor, chosen_TK: Tensor) -> tuple[Tensor, Tensor]:
        self.by_layer[layer] = logits_TE
        return (logits_TE, chosen_TK) if self._inner is None else self._inner.route(layer, logits_TE, chosen_TK)


def record_routes(model: Any, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
    """Experts chosen at every position [T, L, K], most likely first, and their router log-probabilities [T, L, K].

    Neither carries a gradient.
    """
    with torch.no_grad():
        _, router_logits = hidden_and_router_logits(model, token_ids_T, positions_T, attend)
        return chosen_routes(model, router_logits)


def chosen_routes(model: Any, router_logits: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """What record_routes gives, of router logits that are at hand."""
    num_chosen = model.config.get_text_config().num_experts_per_tok
    ids_TLK = torch.stack([logits_TE.topk(num_chosen).indices for logits_TE in router_logits], dim=1)
    return ids_TLK, route_logprobs(router_logits, ids_TLK)


def route_logprobs(router_logits: Sequence[Tensor], ids_TLK: Tensor) -> Tensor:
    """Log-probability [T, L, K] of given experts: log softmax over all experts of each layer, at least in float32."""
    assert len(router_logits) == ids_TLK.shape[1], f"{len(router_logits)} routers, routes of {ids_TLK.shape[1]}"
    by_layer = []
    for layer, logits_TE in enumerate(router_logits):
        dtype = torch.promote_types(logits_TE.dtype, torch.float32)
        by_layer.append(torch.log_softmax(logits_TE, dim=-1, dtype=dtype).gather(1, ids_TLK[:, layer]))
    return torch.stack(by_layer, dim=1)
