"""Routes of experts as another engine tells them: for every layer of the model, of every token that it computed.

Owns: checking them, and the columns that a completion has. Refuses: how an engine sends them, and what the numbers are
for (models/experts/routes.py).
Shapes: _T tokens, _L layers, _K experts of a token at a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from temper.errors import BackendError
from temper.models.experts.routes import RouteShape, route_shape
from temper.types import Ragged


@dataclass(frozen=True, slots=True)
class ToldRoutes:
    shape: RouteShape
    num_layers: int
    """Of the whole model: other engines have a place for layers without a router, too."""

    @staticmethod
    def of(model: Any) -> ToldRoutes:
        """UserError for a model whose routes the trainer cannot replay."""
        return ToldRoutes(route_shape(model), model.config.get_text_config().num_hidden_layers)

    @staticmethod
    def from_told(told: Mapping[str, Any]) -> ToldRoutes:
        """From what dataclasses.asdict makes of one, in JSON."""
        shape = told["shape"]
        return ToldRoutes(RouteShape(**{**shape, "layers": tuple(shape["layers"])}), told["num_layers"])

    def read(self, found: NDArray[np.integer], length: int, who: str) -> Ragged[Any]:
        """Those of a text of so many tokens, of which the last was drawn and is computed by nobody. who: told them."""
        try:
            found_TLK = found.reshape(length - 1, self.num_layers, self.shape.num_chosen)
        except ValueError as error:
            raise BackendError(
                f"{who}'s routes are not those of {length - 1} tokens, {self.num_layers} layers and "
                f"{self.shape.num_chosen} experts: {error}"
            ) from error
        chosen_TLK = found_TLK[:, self.shape.layers]
        if chosen_TLK.size and not 0 <= chosen_TLK.min() <= chosen_TLK.max() < self.shape.num_experts:
            raise BackendError(
                f"{who}'s routes name experts from {chosen_TLK.min()} to {chosen_TLK.max()}, and the model has "
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
