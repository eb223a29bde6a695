"""Paged keys and values, and the attention that reads and writes them.

Owns: the KV tensors and the `attend` functions of a pass: on a CPU over gathered blocks (decode: one query per row;
prefill: a chunk per row), on a GPU by kernels that read the blocks where they are.
Refuses: deciding which blocks belong to whom (scheduler.py).
Shapes: _T tokens, N rows, Q queries per row, L keys per row, H heads, K kv-heads, D head size, M blocks per row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from temper.models.exact import exact_attention
from temper.models.ops import lacks_products


class PagedCache:
    """Keys and values of every layer, in blocks: each tensor is [num_blocks, block_size, K, D]."""

    def __init__(
        self, *, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
        self.block_size, self.num_kv_heads = block_size, num_kv_heads
        # Zeros, not empty: padded positions are multiplied by a zero weight, and 0 * NaN is NaN.
        self._tensor = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return self._tensor.numel() * self._tensor.element_size()

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self._tensor[index, 0], self._tensor[index, 1]

    def store(self, layer: int, key: Tensor, value: Tensor, slots_T: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the tokens' keys and values at their places; returns the whole layer's."""
        keys, values = self.layer(layer)
        keys.flatten(0, 1)[slots_T] = key
        values.flatten(0, 1)[slots_T] = value
        return keys, values

    def copy_blocks(self, source: Tensor, target: Tensor) -> None:
        self._tensor[:, :, target] = self._tensor[:, :, source]


class DecodeAttend:
    """One query per row over its blocks, on a CPU."""

    def __init__(
        self, cache: PagedCache, slots_N: Tensor, blocks_NM: Tensor, lengths_N: Tensor, *, exact: bool = False
    ) -> None:
        self._cache = cache
        self._slots_N = slots_N
        self._blocks_NM = blocks_NM
        self._positions_NQ = lengths_N.unsqueeze(1) - 1
        self._is_exact = exact

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, sliding_window: int | None
    ) -> Tensor:
        keys, values = (t[self._blocks_NM].flatten(1, 2) for t in self._cache.store(layer, key, value, self._slots_N))
        attend = exact_attention if self._is_exact else attend_padded
        return attend(query.unsqueeze(1), keys, values, self._positions_NQ, scaling, sliding_window).squeeze(1)


class PrefillAttend:
    """A chunk of queries per row, on a CPU. Rows are padded to the longest chunk only inside attention."""

    def __init__(
        self, cache: PagedCache, slots_T: Tensor, blocks_NM: Tensor, starts_N: Tensor, counts_N: Tensor,
        *, exact: bool = False,
    ) -> None:  # fmt: skip
        self._cache = cache
        self._slots_T = slots_T
        self._blocks_NM = blocks_NM
        self._is_exact = exact
        longest = int(counts_N.max())
        place_NQ = torch.arange(longest, device=counts_N.device).expand(len(counts_N), longest)
        self._is_real_NQ = place_NQ < counts_N.unsqueeze(1)
        self._positions_NQ = torch.where(self._is_real_NQ, starts_N.unsqueeze(1) + place_NQ, 0)

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, sliding_window: int | None
    ) -> Tensor:
        keys, values = (t[self._blocks_NM].flatten(1, 2) for t in self._cache.store(layer, key, value, self._slots_T))
        padded = query.new_zeros((*self._is_real_NQ.shape, *query.shape[1:]))
        padded[self._is_real_NQ] = query
        attend = exact_attention if self._is_exact else attend_padded
        return attend(padded, keys, values, self._positions_NQ, scaling, sliding_window)[self._is_real_NQ]


def attend_padded(
    query: Tensor, key: Tensor, value: Tensor, positions_NQ: Tensor, scaling: float, sliding_window: int | None
) -> Tensor:
    """query [N, Q, H, D] at these positions, key and value [N, L, K, D] from position 0 on -> [N, Q, H, D].

    The H / K query heads that share a kv-head are laid along the query axis, so keys are never repeated in memory.
    """
    if lacks_products(query):
        wide = query.float(), key.float(), value.float()
        return attend_padded(*wide, positions_NQ, scaling, sliding_window).to(query.dtype)
    num_rows, num_queries, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    per_kv = num_heads // num_kv_heads
    behind_NQL = positions_NQ.unsqueeze(2) - torch.arange(key.shape[1], device=key.device)
    # A key is seen when it is not ahead of the query and, with a window, fewer than `sliding_window` behind it.
    seen = behind_NQL >= 0 if sliding_window is None else (behind_NQL >= 0) & (behind_NQL < sliding_window)
    folded = query.view(num_rows, num_queries, num_kv_heads, per_kv, head_dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(num_rows, num_kv_heads, per_kv * num_queries, head_dim)
    mask = seen.unsqueeze(1).expand(-1, per_kv, -1, -1).reshape(num_rows, 1, per_kv * num_queries, -1)
    output = scaled_dot_product_attention(
        folded, key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask, scale=scaling
    )
    output = output.view(num_rows, num_kv_heads, per_kv, num_queries, head_dim).permute(0, 3, 1, 2, 4)
    return output.reshape(num_rows, num_queries, num_heads, head_dim)


@dataclass(slots=True, kw_only=True)
class GpuAttend:
    """Decode rows or prefill chunks on a GPU. No size depends on the data, so that a CUDA graph can replay it."""

    cache: PagedCache
    slots_T: Tensor
    blocks_NM: Tensor
    positions_N: Tensor
    """Position of the first query of each row."""
    query_starts: Tensor
    """[N + 1]: which queries belong to which row."""
    longest_query: int
    splits: int
    """Parts in which the keys of a decode row are read at once. 0: by the one kernel that all of `exact` mode uses."""
    lengths_N: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.lengths_N = self.positions_N + 1  # once, not in every layer

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, sliding_window: int | None
    ) -> Tensor:
        self.cache.store(layer, key, value, self.slots_T)
        return self._attend(layer, query, scaling, sliding_window)

    def rotating(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rotation: tuple[Tensor, Tensor],
        *, scaling: float, sliding_window: int | None,
    ) -> Tensor:  # fmt: skip
        """Queries and keys come unrotated: rotation and storing are one kernel."""
        from temper.models.kernels.rope import rotate_and_store

        query = rotate_and_store(query, key, value, *rotation, *self.cache.layer(layer), self.slots_T)
        return self._attend(layer, query, scaling, sliding_window)

    def _attend(self, layer: int, query: Tensor, scaling: float, sliding_window: int | None) -> Tensor:
        from temper.models.kernels.tiled_attention import decode_attention, paged_attention

        keys, values = self.cache.layer(layer)
        if self.longest_query == 1 and self.splits:
            return decode_attention(
                query, keys, values, self.blocks_NM, self.lengths_N,
                scaling=scaling, sliding_window=sliding_window, splits=self.splits,
            )  # fmt: skip
        return paged_attention(
            query, keys, values, self.blocks_NM, self.query_starts, self.positions_N,
            scaling=scaling, sliding_window=sliding_window, longest_query=self.longest_query,
        )  # fmt: skip
