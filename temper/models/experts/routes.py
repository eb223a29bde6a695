"""Routes that were taken: recorded where tokens are drawn, replayed where they are trained (R3, arXiv 2510.11370).

Only the choice of experts is replayed. Their weights come from the router that computes now, so that it gets its
gradient. What is recorded lies beside keys and values, by slot: whoever starts behind a known prefix finds its routes.
Owns: both sides. Refuses: models whose routers are not walked (routing.py).
Shapes: _T packed tokens, _E experts, _L layers with a router, _K experts of a token at a layer, _W = L * K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from temper.errors import UserError
from temper.models.decoder import has_seen_routers
from temper.models.experts.routing import EXPERT_FAMILIES, expert_layers, num_experts_of

Recorded = NDArray[np.integer]
"""[n, L * K] experts of n tokens, first layer first; one byte each up to 256 experts, else two."""


@dataclass(frozen=True, slots=True)
class RouteShape:
    """What one token's route consists of."""

    layers: tuple[int, ...]
    """Layers that have a router."""
    num_chosen: int
    num_experts: int

    @property
    def width(self) -> int:
        return len(self.layers) * self.num_chosen

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8 if self.num_experts <= 256 else torch.int16


def route_shape(model: Any) -> RouteShape:
    """UserError for a model whose routes are not seen."""
    text = model.config.get_text_config()
    require_routes(model.get_decoder().config.get_text_config())
    return RouteShape(tuple(expert_layers(model)), text.num_experts_per_tok, num_experts_of(text))


def require_routes(config: Any) -> None:
    """UserError for a model, by its description, whose routes are not seen."""
    if not has_seen_routers(config):
        raise UserError(
            f"model.replay_routes: routes are seen in the families {', '.join(EXPERT_FAMILIES)}, and this model is a "
            f"{config.model_type}. Use model.replay_routes = false"
        )


class RouteTable:
    """The route of every slot of a paged cache."""

    def __init__(self, shape: RouteShape, num_blocks: int, block_size: int, device: torch.device) -> None:
        self._shape, self._block_size = shape, block_size
        self._places = {layer: place for place, layer in enumerate(shape.layers)}
        size = (num_blocks * block_size, len(shape.layers), shape.num_chosen)
        self._slots_SLK = torch.zeros(size, dtype=shape.dtype, device=device)

    def at(self, slots_T: Tensor) -> _Recorder:
        """Writes the routes of a pass over tokens that have these slots."""
        return _Recorder(self._slots_SLK, self._places, slots_T)

    def copy_blocks(self, source: Tensor, target: Tensor) -> None:
        blocks = self._slots_SLK.view(-1, self._block_size, *self._slots_SLK.shape[1:])
        blocks[target] = blocks[source]

    def read(self, blocks: NDArray[np.int64], start: int, stop: int) -> Recorded:
        """Routes of the tokens from position `start` to before `stop` of a sequence that holds these blocks."""
        positions = np.arange(start, stop)
        slots = blocks[positions // self._block_size] * self._block_size + positions % self._block_size
        found = self._slots_SLK[torch.from_numpy(slots).to(self._slots_SLK.device)]
        return found.flatten(1).cpu().numpy()


class _Recorder:
    def __init__(self, slots_SLK: Tensor, places: dict[int, int], slots_T: Tensor) -> None:
        self._slots_SLK, self._places, self._slots_T = slots_SLK, places, slots_T

    def route(self, layer: int, logits_TE: Tensor, chosen_TK: Tensor) -> tuple[Tensor, Tensor]:
        self._slots_SLK[self._slots_T, self._places[layer]] = chosen_TK.to(self._slots_SLK.dtype)
        return logits_TE, chosen_TK


class Replay:
    """Recorded routes of one pass. By layer, not by a cursor: a layer that is computed again finds its own."""

    def __init__(
        self, shape: RouteShape, routes_TW: Tensor, is_routed_T: Tensor, *, only_measures: bool = False
    ) -> None:
        """is_routed: tokens that have a record; the others take their router's choice.

        only_measures: all tokens take their router's choice, and the records are compared with it.
        """
        self._only_measures = only_measures
        assert routes_TW.shape[1] == shape.width, (
            f"routes of {routes_TW.shape[1]} experts a token, and the model has {shape.width}"
        )
        routes_TLK = routes_TW.long().view(-1, len(shape.layers), shape.num_chosen)
        self._by_layer = dict(zip(shape.layers, routes_TLK.unbind(1), strict=True))
        self.is_routed_T = is_routed_T
        self._is_routed_T1 = is_routed_T.unsqueeze(1)
        self._asked = dict.fromkeys(shape.layers, 0)
        self.moved: dict[int, Tensor] = {}
        """By layer [T]: of the experts in a token's record, how many the router would not have chosen now."""

    def route(self, layer: int, logits_TE: Tensor, chosen_TK: Tensor) -> tuple[Tensor, Tensor]:
        recorded_TK = self._by_layer[layer]
        assert recorded_TK.shape == chosen_TK.shape, "a route for every token of the pass, and no other"
        self._asked[layer] += 1
        is_other_TK = (recorded_TK.unsqueeze(2) != chosen_TK.unsqueeze(1)).all(2)
        self.moved[layer] = (is_other_TK & self._is_routed_T1).sum(1)
        return logits_TE, chosen_TK if self._only_measures else torch.where(self._is_routed_T1, recorded_TK, chosen_TK)

    def require_taken_once(self) -> None:
        """Call it when the pass is done: every layer has asked for its routes, once."""
        wrong = {layer: times for layer, times in self._asked.items() if times != 1}
        assert not wrong, f"routes of layers were asked for so often: {wrong}"


def set_replaying(model: Any, replays: bool, *, only_measures: bool = False) -> None:
    """Whether passes of this model replay the routes that a batch brings along, or compare them with its own choice,
    from now on."""
    if replays:
        route_shape(model)
    model.temper_replays, model.temper_only_measures = replays, only_measures


def only_measures(model: Any) -> bool:
    return getattr(model, "temper_only_measures", False)


def replays(model: Any) -> bool:
    return getattr(model, "temper_replays", False)
