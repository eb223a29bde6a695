"""Which experts a token meets and how much each counts, as its family defines it.

Owns: families with experts that are walked, the router's softmax and its top. Refuses: the products (products.py).
Shapes: _T packed tokens, _D width, _E experts, _K experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFamily:
    """How the weights of the chosen experts follow from the router's probabilities, which are float32 everywhere."""

    always_normalizes: bool = False
    """Whether weights add up to 1 whatever the configuration says; else norm_topk_prob decides."""
    rounds_weights: bool = True
    """Whether weights have the dtype of the states; else they stay float32."""


EXPERT_FAMILIES = {
    "mixtral": ExpertFamily(always_normalizes=True, rounds_weights=False),
    "olmoe": ExpertFamily(),
    "qwen2_moe": ExpertFamily(),
    "qwen3_moe": ExpertFamily(),
}
"""By model_type. All choose the top of a softmax over all experts."""


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


def num_experts_of(config: Any) -> int:
    text = config.get_text_config()
    return int(getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0)


def weights_of(config: Any, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """How much each of these experts counts [T, K]; differentiable in the logits, whoever chose the experts."""
    family = EXPERT_FAMILIES[config.model_type]
    weights_TK = torch.softmax(logits_TE, dim=-1, dtype=torch.float32).gather(1, experts_TK)
    if family.always_normalizes or config.norm_topk_prob:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return weights_TK.to(logits_TE.dtype) if family.rounds_weights else weights_TK


def top_experts(logits_TE: Tensor, count: int) -> Tensor:
    """The most likely experts [T, K]."""
    return _probabilities(logits_TE).topk(count, dim=-1).indices


def ordered_experts(logits_TE: Tensor, count: int) -> Tensor:
    """The same; of equally likely ones the first, whatever the number of tokens."""
    return _probabilities(logits_TE).sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _probabilities(logits_TE: Tensor) -> Tensor:
    """Rounded as the family's own: of logits that differ by less, two may be equal here."""
    return torch.softmax(logits_TE.detach(), dim=-1, dtype=torch.float32)
