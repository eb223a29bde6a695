"""The experts of few tokens on a GPU, as a decode step has them: fewer launches, every weight read once.

Owns: when that way is taken. Refuses: gradients, exact numerics (products.py), the kernels (kernels/experts.py).
Shapes: _T tokens, _D width, _E experts, _K experts of a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from temper.models.experts.routing import EXPERT_FAMILIES, Routes, weights_of

ROWS_PER_EXPERT = 24
"""On average. With more the library's grouped product is the faster (seen on an H200: 383 us against 497 at 16, 637
against 515 at 32, before tiles of 32 rows)."""


def has_few_rows(hidden_TD: Tensor, experts: Any, num_chosen: int) -> bool:
    weight = experts.gate_up_proj
    if not hidden_TD.is_cuda or hidden_TD.dtype is not torch.bfloat16 or torch.is_grad_enabled():
        return False
    return len(hidden_TD) * num_chosen <= ROWS_PER_EXPERT * len(weight) and weight.is_contiguous()


def few_rows_experts(layer: Any, hidden_TD: Tensor, logits_TE: Tensor, routes: Routes | None) -> Tensor:
    """What the chosen experts of each token say, weighted."""
    from temper.models.kernels.experts import choose_experts, mixture

    experts, config = layer.mlp.experts, layer.self_attn.config
    family = EXPERT_FAMILIES[config.model_type]
    experts_TK, weights_TK = choose_experts(
        logits_TE,
        config.num_experts_per_tok,
        normalizes=family.always_normalizes or config.norm_topk_prob,
        dtype=logits_TE.dtype if family.rounds_weights else torch.float32,
    )
    if routes is not None:
        logits_TE, given_TK = routes.route(layer.self_attn.layer_idx, logits_TE, experts_TK)
        if given_TK is not experts_TK:
            experts_TK, weights_TK = given_TK.contiguous(), weights_of(config, logits_TE, given_TK)
    return mixture(hidden_TD.contiguous(), experts.gate_up_proj, experts.down_proj, experts_TK, weights_TK)
