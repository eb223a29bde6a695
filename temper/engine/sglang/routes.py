"""Routes of experts as an SGLang server tells them.

Owns: what is asked for, and reading it. Refuses: what the numbers are for (models/experts/routes.py).
Written against SGLang 0.5.23: srt/state_capturer/routed_experts.py records experts before they are placed on ranks, for
every layer of the model and every token that was computed; srt/managers/tokenizer_manager.py sends them with the end of
an answer, as int32 in base64.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from temper.errors import BackendError
from temper.models.experts.routes import RouteShape, route_shape
from temper.types import Ragged

FLAG = "--enable-return-routed-experts"


@dataclass(frozen=True, slots=True)
class ToldRoutes:
    shape: RouteShape
    num_layers: int
    """Of the whole model: the server has a place for layers without a router, too."""

    def read(self, told: str, length: int) -> Ragged[Any]:
        """Those of a text of so many tokens, of which the last was drawn and is computed by nobody."""
        try:
            values = np.frombuffer(base64.b64decode(told, validate=True), dtype=np.int32)
            found_TLK = values.reshape(length - 1, self.num_layers, self.shape.num_chosen)
        except (binascii.Error, TypeError, ValueError) as error:
            raise BackendError(
                f"SGLang's routes are not those of {length - 1} tokens, {self.num_layers} layers and "
                f"{self.shape.num_chosen} experts: {error}"
            ) from error
        chosen_TLK = found_TLK[:, self.shape.layers]
        if chosen_TLK.size and not 0 <= chosen_TLK.min() <= chosen_TLK.max() < self.shape.num_experts:
            raise BackendError(
                f"SGLang's routes name experts from {chosen_TLK.min()} to {chosen_TLK.max()}, and the model has "
                f"{self.shape.num_experts}"
            )
        return self._by_token(chosen_TLK, length)

    def unknown(self, length: int) -> Ragged[Any]:
        """Those of a text of which nothing was told."""
        return self._by_token(np.empty((0, len(self.shape.layers), self.shape.num_chosen)), length)

    def _by_token(self, chosen_TLK: NDArray[Any], length: int) -> Ragged[Any]:
        dtype = np.uint8 if self.shape.dtype.itemsize == 1 else np.int16
        counts = np.where(np.arange(length) < len(chosen_TLK), self.shape.width, 0)
        return Ragged.of_counts(chosen_TLK.reshape(-1).astype(dtype), counts)


def told_routes(model: Any) -> ToldRoutes:
    """UserError for a model whose routes the trainer cannot replay."""
    return ToldRoutes(route_shape(model), model.config.get_text_config().num_hidden_layers)
