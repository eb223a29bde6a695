"""Weights on their way to a sampler process of another machine, over the socket that it is asked over.

Owns: the pieces and their order. The other side puts them aside into memory of its own, and takes all of them over
when it is told to load: until then they change nothing. Refuses: memory that both have (weights.py).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from temper.engine.process.weights import SendPiece, places_of
from temper.engine.process.wire import Frame
from temper.errors import BackendError
from temper.types import Publication

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

PIECE_BYTES = 16 << 20
"""Of one frame: requests that are sent meanwhile wait for no more than that."""


class SentWeights:
    """Has no state: every sampler is sent every tensor."""

    async def hand_over(self, publication: Publication, send: SendPiece) -> dict[str, Any]:
        """What the other side needs to find the tensors among the bytes that it was sent."""
        places, size = places_of(publication.alike or publication.tensors)
        for name, shape, kind, start in places:
            tensor = publication.tensors[name]
            if [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] != [shape, kind]:
                raise BackendError(f"publication {publication.version}: {name} is not what was announced")
            data = await asyncio.to_thread(_bytes_of, tensor)
            for first in range(0, len(data), PIECE_BYTES):
                piece = Frame("piece", fields={"start": start + first, "size": size})
                piece.put(data[first : first + PIECE_BYTES])
                await send(piece)
        return {"version": publication.version, "size": size, "tensors": places}

    def forget(self) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    import torch

    return tensor.detach().contiguous().reshape(-1).cpu().view(torch.uint8).numpy()
