"""The one place where Temper enters the forward pass of a Hugging Face model: its attention interface.

A model loaded by Temper calls `attend`, a function given with each forward pass. The engine passes one that reads and
writes paged keys and values; the trainer one that keeps packed rows apart. Both run the same module and parameters.
Owns: the registration and the calling convention. Refuses: attention features that no `attend` of ours implements.
Shapes: _T packed tokens, H heads, D head size.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from temper.errors import UserError

ATTENTION_NAME = "temper"

UNSUPPORTED = ("softcap", "s_aux")
"""Keyword arguments by which a model asks for attention logit capping or sinks."""


class Attend(Protocol):
    """Attention of packed tokens. query is [T, H, D], key and value are [T, H_kv, D]; returns [T, H, D]."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, sliding_window: int | None
    ) -> Tensor: ...


def attention_interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer. Tensors arrive as [1, H, T, D] and leave as [1, T, H, D]."""
    attend = kwargs.get("attend")
    if attend is None:
        raise UserError(
            "this model was loaded for Temper's engine and trainer; load it with transformers to call it directly"
        )
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UserError(
                f'{type(module).__name__} asks for attention with "{name}", which Temper does not implement yet'
            )
    scaling = kwargs.get("scaling")
    window = kwargs.get("sliding_window")
    width = value.shape[-1]
    output = attend(  # type: ignore[operator]
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        # DeepSeek's values are narrower than its keys; caches and kernels have one size for both.
        pad(value[0], (0, key.shape[-1] - width)).transpose(0, 1),
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=window,
    )
    return output[..., :width].unsqueeze(0), None


# No mask function is registered on purpose: transformers then builds no mask, and `attend` alone decides who sees whom.
ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, attention_interface)
