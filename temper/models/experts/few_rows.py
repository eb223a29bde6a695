"""The experts of few tokens on a GPU, as a decode step has them: fewer launches, every weight read once.

Owns: when that way is taken. Refuses: gradients, exact numerics (products.py), the kernels (kernels/experts.py).
Shapes: _T tokens, _D width, _E experts, _K experts of a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from temper.models.experts.routing import EXPERT_FAMILIES, Routes, chosen_experts, top_experts, weights_of
from temper.models.lora.low_rank import is_adapted

ROWS_PER_EXPERT = 24
"""On average. With more the library's grouped product is the faster (seen on an H200: 383 us against 497 at 16, 637
against 515 at 32, before tiles of 32 rows)."""


def has_few_rows(hidden_TD: Tensor, experts: Any, num_chosen: int) -> bool:
    if not hidden_TD.is_cuda or hidden_TD.dtype is not torch.bfloat16 or torch.is_grad_enabled():
        return False
    if is_adapted(experts) or hasattr(experts, "temper_exchange"):
        return False
    weight = experts.gate_up_proj
    return len(hidden_TD) * num_chosen <= ROWS_PER_EXPERT * len(weight) and weight.is_contiguous()


def few_rows_experts(layer: Any, hidden_TD: Tensor, logits_TE: Tensor, routes: Routes | None) -> Tensor:
    """What the chosen experts of each token say, weighted."""
    from temper.models.kernels.experts import mixture

    mlp, config = layer.mlp, layer.self_attn.config
    experts_TK, weights_TK = _choice(config, mlp.gate, logits_TE)
    if routes is not None:
        logits_TE, given_TK = routes.route(layer.self_attn.layer_idx, logits_TE, experts_TK)
        if given_TK is not experts_TK:
            experts_TK, weights_TK = given_TK.contiguous(), weights_of(config, logits_TE, given_TK)
    return mixture(hidden_TD.contiguous(), mlp.experts.gate_up_proj, mlp.experts.down_proj, experts_TK, weights_TK)


def _choice(config: Any, router: Any, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
    from temper.models.kernels.experts import choose_experts

    family = EXPERT_FAMILIES[config.model_type]
    if family.has_bias:
        experts_TK = chosen_experts(config, router, top_experts, torch.sigmoid, logits_TE)
        return experts_TK, weights_of(config, logits_TE, experts_TK)
    return choose_experts(
        logits_TE,
        config.num_experts_per_tok,
        normalizes=family.always_normalizes or config.norm_topk_prob,
        dtype=logits_TE.dtype if family.rounds_weights else torch.float32,
    )
