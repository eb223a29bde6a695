"""Paged keys and values, and the attention that reads and writes them.

Owns: the KV tensors and the two `attend` functions of a step (decode: one query per row; prefill: a chunk per row).
Refuses: deciding which blocks belong to whom (scheduler.py).
Shapes: _T tokens, N rows, Q queries per row, L keys per row, H heads, K kv-heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class PagedCache:
    """Keys and values of every layer, in blocks: each tensor is [num_blocks, block_size, K, D]."""

    def __init__(
        self, *, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
        self.block_size = block_size
        # Zeros, not empty: padded positions are multiplied by a zero weight, and 0 * NaN is NaN.
        self._tensor = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return self._tensor.numel() * self._tensor.element_size()

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self._tensor[index, 0], self._tensor[index, 1]

    def copy_blocks(self, source: Tensor, target: Tensor) -> None:
        self._tensor[:, :, target] = self._tensor[:, :, source]


class DecodeAttend:
    """One query per row over its blocks. All inputs are fixed-size tensors, so that a CUDA graph can replay it."""

    def __init__(self, cache: PagedCache, slots_N: Tensor, blocks_NM: Tensor, lengths_N: Tensor) -> None:
        self._cache = cache
        self._slots_N = slots_N
        self._blocks_NM = blocks_NM
        keys = torch.arange(blocks_NM.shape[1] * cache.block_size, device=blocks_NM.device)
        self._behind_NL = lengths_N.unsqueeze(1) - 1 - keys.unsqueeze(0)

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, sliding_window: int | None
    ) -> Tensor:
        keys, values = self._cache.layer(layer)
        keys.flatten(0, 1)[self._slots_N] = key
        values.flatten(0, 1)[self._slots_N] = value
        visible_NL = _visible(self._behind_NL, sliding_window)
        output = attend_padded(
            query.unsqueeze(1),
            keys[self._blocks_NM].flatten(1, 2),
            values[self._blocks_NM].flatten(1, 2),
            visible_NL.unsqueeze(1),
            scaling,
        )
        return output.squeeze(1)


class PrefillAttend:
    """A chunk of queries per row. Rows are padded to the longest chunk only inside attention."""

    def __init__(
        self, cache: PagedCache, slots_T: Tensor, blocks_NM: Tensor, starts_N: Tensor, counts_N: Tensor
    ) -> None:
        self._cache = cache
        self._slots_T = slots_T
        self._blocks_NM = blocks_NM
        longest = int(counts_N.max())
        place_NQ = torch.arange(longest, device=counts_N.device).expand(len(counts_N), longest)
        self._is_real_NQ = place_NQ < counts_N.unsqueeze(1)
        keys = torch.arange(blocks_NM.shape[1] * cache.block_size, device=blocks_NM.device)
        positions_NQ = torch.where(self._is_real_NQ, starts_N.unsqueeze(1) + place_NQ, 0)
        self._behind_NQL = positions_NQ.unsqueeze(2) - keys

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, sliding_window: int | None
    ) -> Tensor:
        keys, values = self._cache.layer(layer)
        keys.flatten(0, 1)[self._slots_T] = key
        values.flatten(0, 1)[self._slots_T] = value
        padded = query.new_zeros((*self._is_real_NQ.shape, *query.shape[1:]))
        padded[self._is_real_NQ] = query
        output = attend_padded(
            padded,
            keys[self._blocks_NM].flatten(1, 2),
            values[self._blocks_NM].flatten(1, 2),
            _visible(self._behind_NQL, sliding_window),
            scaling,
        )
        return output[self._is_real_NQ]


def attend_padded(query: Tensor, key: Tensor, value: Tensor, visible_NQL: Tensor, scaling: float) -> Tensor:
    """query [N, Q, H, D], key and value [N, L, K, D] -> [N, Q, H, D].

    The H / K query heads that share a kv-head are laid along the query axis, so keys are never repeated in memory.
    """
    num_rows, num_queries, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    per_kv = num_heads // num_kv_heads
    folded = query.view(num_rows, num_queries, num_kv_heads, per_kv, head_dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(num_rows, num_kv_heads, per_kv * num_queries, head_dim)
    mask = visible_NQL.unsqueeze(1).expand(-1, per_kv, -1, -1).reshape(num_rows, 1, per_kv * num_queries, -1)
    output = scaled_dot_product_attention(
        folded, key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask, scale=scaling
    )
    output = output.view(num_rows, num_kv_heads, per_kv, num_queries, head_dim).permute(0, 3, 1, 2, 4)
    return output.reshape(num_rows, num_queries, num_heads, head_dim)


def _visible(behind: Tensor, sliding_window: int | None) -> Tensor:
    """A key is seen when it is not ahead of the query and, with a window, fewer than `sliding_window` behind it."""
    seen = behind >= 0
    return seen if sliding_window is None else seen & (behind < sliding_window)
