"""Where numbers stop being numbers: for the message of an engine that drew a token with log-probability NaN.

Owns: finding the weights or the layer. Refuses: looking before something is wrong; it waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from temper.models.proof import KeptRows
from temper.models.save import saved_tensors
from temper.models.states import hidden_states

MAX_NAMED = 3


def explain_nan(model: Any, token_ids: Sequence[int]) -> str:
    """What is not finite in this model, or in what it makes of these tokens; "" when all of it is."""
    if wrong := [name for name, tensor in saved_tensors(model).items() if not _is_finite(tensor)]:
        more = f" and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
        return f"its weights {', '.join(wrong[:MAX_NAMED])}{more} are not finite"
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    layer = _first_layer(model, token_ids)
    return "" if layer is None else f"its weights are finite, and {dtype} overflows before {layer}"


@torch.inference_mode()
def _first_layer(model: Any, token_ids: Sequence[int]) -> str | None:
    """The first place on the way of these tokens that is given something else than finite numbers."""
    found: list[int] = []
    attend = KeptRows().chunk([(0, 0, len(token_ids))])

    def look(layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if not all(map(_is_finite, (query, key, value))):
            found.append(layer)
        return attend(layer, query, key, value, **options)

    ids_T = torch.tensor(token_ids, device=next(model.parameters()).device)
    states = hidden_states(model, ids_T, torch.arange(len(ids_T), device=ids_T.device), look)
    if found:
        return f"the attention of layer {found[0]}"
    return None if _is_finite(states) else "the head"


def _is_finite(tensor: Tensor) -> bool:
    wide = tensor.float() if tensor.element_size() == 1 else tensor  # float8 knows no such question
    return bool(wide.isfinite().all())
