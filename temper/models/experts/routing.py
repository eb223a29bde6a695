"""Which experts a token meets and how much each counts, as its family defines it.

Owns: families with experts that are walked, the router's scores and their top. Refuses: the products (products.py).
Shapes: _T packed tokens, _D width, _E experts, _K experts of a token, G groups of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFamily:
    """How the weights of the chosen experts follow from the router's scores, which are float32 everywhere."""

    has_bias: bool = False
    """Whether experts are scored one by one, by a sigmoid, and a bias that counts for the choice alone is added
    (DeepSeek-V3); else by a softmax over all of them."""
    always_normalizes: bool = False
    """Whether weights add up to 1 whatever the configuration says; else norm_topk_prob decides."""
    rounds_weights: bool = True
    """Whether weights have the dtype of the states; else they stay float32."""


EXPERT_FAMILIES = {
    "dots1": ExpertFamily(has_bias=True, rounds_weights=False),
    "glm4_moe": ExpertFamily(has_bias=True, rounds_weights=False),
    "mixtral": ExpertFamily(always_normalizes=True, rounds_weights=False),
    "olmoe": ExpertFamily(),
    "qwen2_moe": ExpertFamily(),
    "qwen3_moe": ExpertFamily(),
    "solar_open": ExpertFamily(has_bias=True, rounds_weights=False),
}
"""By model_type."""

Choose = Callable[[Tensor, int], Tensor]
"""(scores [T, E], how many) -> the best experts [T, K]: top_experts or ordered_experts."""
Sigmoid = Callable[[Tensor], Tensor]
"""Ops.sigmoid."""


class Routes(Protocol):
    """Told of every layer's choice, and may replace it: records routes, replays recorded ones, or measures."""

    def route(self, layer: int, logits_TE: Tensor, chosen_TK: Tensor) -> tuple[Tensor, Tensor]:
        """The logits from which weights follow, and the experts [T, K] that work. logits: the router's; chosen: its own
        choice, most likely first."""
        ...


def has_experts(model: Any) -> bool:
    return model.get_decoder().config.get_text_config().model_type in EXPERT_FAMILIES


def expert_layers(model: Any) -> list[int]:
    """Layers that have a router; the others of a family may be dense."""
    return [place for place, layer in enumerate(model.get_decoder().layers) if is_sparse(layer.mlp)]


def is_sparse(mlp: Any) -> bool:
    return "experts" in dict(mlp.named_children())


def has_bias(model: Any) -> bool:
    """Whether its routers have a bias that balances experts."""
    return has_experts(model) and EXPERT_FAMILIES[model.get_decoder().config.get_text_config().model_type].has_bias


def num_experts_of(config: Any) -> int:
    text = config.get_text_config()
    return int(getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0)


def router_logits(config: Any, router: Any, linear: Callable[..., Tensor], normed_TD: Tensor) -> Tensor:
    """[T, E], by a product in the dtype of the weights or, where experts have a bias, in float32."""
    if EXPERT_FAMILIES[config.model_type].has_bias:
        return linear(normed_TD.float(), router.weight.float(), None)
    return linear(normed_TD, router.weight, None)


def chosen_experts(config: Any, router: Any, choose: Choose, sigmoid: Sigmoid, logits_TE: Tensor) -> Tensor:
    """The router's own choice [T, K], best first. Without gradient."""
    logits_TE = logits_TE.detach()
    if not EXPERT_FAMILIES[config.model_type].has_bias:
        # Rounded as the family's own: of logits that differ by less, two may be equal here.
        return choose(torch.softmax(logits_TE, dim=-1, dtype=torch.float32), config.num_experts_per_tok)
    scores_TE = sigmoid(logits_TE) + router.e_score_correction_bias
    if config.n_group > 1:  # by the sum of their two best experts some groups are chosen, and experts among these
        scores_TGE = scores_TE.unflatten(1, (config.n_group, -1))
        groups_TG = choose(scores_TGE.topk(2, dim=-1).values.sum(-1), config.topk_group)
        is_out_TG = torch.ones_like(scores_TGE[:, :, 0], dtype=torch.bool).scatter_(1, groups_TG, False)
        scores_TE = scores_TGE.masked_fill(is_out_TG.unsqueeze(2), -torch.inf).flatten(1)
    return choose(scores_TE, config.num_experts_per_tok)


def weights_of(config: Any, logits_TE: Tensor, experts_TK: Tensor, sigmoid: Sigmoid = torch.sigmoid) -> Tensor:
    """How much each of these experts counts [T, K]; differentiable in the logits, whoever chose the experts."""
    family = EXPERT_FAMILIES[config.model_type]
    if family.has_bias:
        weights_TK = sigmoid(logits_TE).gather(1, experts_TK)
        if config.norm_topk_prob:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        return weights_TK * config.routed_scaling_factor
    weights_TK = torch.softmax(logits_TE, dim=-1, dtype=torch.float32).gather(1, experts_TK)
    if family.always_normalizes or config.norm_topk_prob:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return weights_TK.to(logits_TE.dtype) if family.rounds_weights else weights_TK


def top_experts(scores_TE: Tensor, count: int) -> Tensor:
    """The best experts [T, K]."""
    return scores_TE.topk(count, dim=-1).indices


def ordered_experts(scores_TE: Tensor, count: int) -> Tensor:
    """The same; of equally good ones the first, whatever the number of tokens."""
    return scores_TE.sort(dim=-1, descending=True, stable=True).indices[:, :count]
