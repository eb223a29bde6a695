"""What a decoder says of packed tokens, and the float32 head over it: the pass that engine and trainer share.

Owns: which way a model is gone through, the arithmetic of its head. Refuses: attention (given), loading (load.py).
Shapes: _T packed tokens, _D width, _V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from temper.models.decoder import can_walk, numerics_of, walk
from temper.models.exact import tiled_linear
from temper.models.experts.routing import Routes
from temper.models.ops import cpu_linear


def hidden_states(
    model: Any, token_ids_T: Tensor, positions_T: Tensor, attend: Any, routes: Routes | None = None
) -> Tensor:
    """Last hidden states [T, width] of packed tokens, without the head. routes: of a walked model with experts only."""
    if can_walk(model):
        return walk(model, token_ids_T, positions_T, attend, routes)
    assert routes is None, "only routers that are walked tell their routes"
    output = model.get_decoder()(
        input_ids=token_ids_T.unsqueeze(0), position_ids=positions_T.unsqueeze(0), use_cache=False, attend=attend
    )
    return output.last_hidden_state[0]


@dataclass(frozen=True, slots=True)
class Head:
    """The language-model head with float32 logits (float64 stays float64): in bf16 20.03 and 19.97 are one number.

    On a GPU the weight stays bfloat16: products of bfloat16 numbers are exact in float32, and sums are kept there.
    """

    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    is_exact: bool = False
    """Whether logits of a row must not depend on the rows beside it."""

    @staticmethod
    def of(model: Any) -> Head:
        linear = model.get_output_embeddings()
        weight, bias = linear.weight, getattr(linear, "bias", None)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        wide = weight if weight.is_cuda else weight.to(dtype)
        return Head(wide, None if bias is None else bias.to(dtype), softcap, numerics_of(model) == "exact")

    def logits(self, hidden_TD: Tensor) -> Tensor:
        # Neither of the GPU's products is differentiable: who asks for a gradient takes the plain one.
        is_gpu = self.weight.is_cuda and not (
            torch.is_grad_enabled() and (hidden_TD.requires_grad or self.weight.requires_grad)
        )
        if is_gpu and self.is_exact:
            from temper.models.kernels.products import exact_product

            logits_TV = exact_product(hidden_TD.to(self.weight.dtype), self.weight, self.bias, torch.float32)
        elif is_gpu and self.weight.dtype in (torch.bfloat16, torch.float16):
            logits_TV = torch.mm(hidden_TD, self.weight.t(), out_dtype=torch.float32)
            logits_TV = logits_TV if self.bias is None else logits_TV.add_(self.bias)
        elif self.is_exact and not self.weight.is_cuda:
            logits_TV = tiled_linear(hidden_TD.to(self.weight.dtype), self.weight, self.bias)
        else:
            wide = torch.promote_types(self.weight.dtype, torch.float32)
            linear = nn.functional.linear if self.weight.is_cuda else cpu_linear
            logits_TV = linear(hidden_TD.to(wide), self.weight.to(wide), self.bias)
        if self.softcap is not None:
            logits_TV = self.softcap * torch.tanh(logits_TV / self.softcap)
        return logits_TV
