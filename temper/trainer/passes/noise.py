"""Noise on the embeddings while a gradient is taken (NEFTune, arXiv 2310.05914).

Owns: which noise a row gets: it depends on the step and on the row's own tokens, never on the rows beside it.
Shapes: _T packed tokens, _L tokens of one row, _D width.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from temper.types import Microbatch


@contextmanager
def noisy_embeddings(model: Any, microbatch: Microbatch, alpha: float, seed: int) -> Iterator[None]:
    """Forward passes of the microbatch inside add uniform(-1, 1) * alpha / sqrt(L * D) to what is embedded.

    `seed` is that of the optimiser step. Rows of equal tokens in one step get equal noise.
    """

    def add_noise(module: Any, given: Any, embedded: Tensor) -> Tensor:
        noise_TD = row_noise(microbatch, embedded.shape[-1], alpha, seed, embedded.device)
        return embedded + noise_TD.to(embedded.dtype).view_as(embedded)

    hook = model.get_input_embeddings().register_forward_hook(add_noise)
    try:
        yield
    finally:
        hook.remove()


def row_noise(microbatch: Microbatch, width: int, alpha: float, seed: int, device: torch.device) -> Tensor:
    """[T, D] for the rows of a microbatch, float32."""
    rows = torch.split(microbatch.token_ids.cpu(), list(microbatch.lengths))
    return torch.cat([_noise(row_L, width, alpha, seed, device) for row_L in rows])


def _noise(token_ids_L: Tensor, width: int, alpha: float, seed: int, device: torch.device) -> Tensor:
    # One generator per row: from a common one, the noise of a row would depend on who was packed before it.
    digest = hashlib.blake2b(token_ids_L.numpy().tobytes(), digest_size=8, key=seed.to_bytes(16, "little", signed=True))
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest.digest(), "little") >> 1)
    size = (len(token_ids_L), width)
    noise_LD = torch.empty(size, device=device, dtype=torch.float32).uniform_(-1, 1, generator=generator)
    return noise_LD * (alpha / math.sqrt(len(token_ids_L) * width))
