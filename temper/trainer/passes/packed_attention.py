"""The trainer's attention: packed rows that cannot see each other.

Where there is a kernel for rows of any lengths (varlen.py), nothing is padded, and long rows are attended to one by one
(long_rows.py). Elsewhere rows are padded, on the right, so that plain causal attention keeps rows apart without a mask.
Rows of like length are padded together, so padding at most doubles T.
Owns: row layout, sliding windows, the exact form of the same. Refuses: caches (the engine has its own attend).
Shapes: _T packed tokens, _P padded slots, _S rows, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from temper.models.exact import exact_attention
from temper.models.ops import lacks_products
from temper.trainer.passes import long_rows, varlen
from temper.trainer.passes.gathering import place_rows, take_rows

KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

WRAPPINGS = 3
"""Steps of autograd that torch may put behind an attention kernel, such as cutting off a padded head size."""


class PackedAttention:
    """`attend` for the rows of one microbatch. Index tensors are made once and serve every layer."""

    def __init__(self, lengths: Sequence[int], device: torch.device, *, is_ordered: bool = False) -> None:
        """is_ordered: gradients are added up in a fixed order (order_gradients)."""
        self._is_ordered = is_ordered
        self._buckets, slots = lay_out(lengths)
        self._num_slots = sum(rows * longest for rows, longest in self._buckets)
        is_dense = torch.equal(slots, torch.arange(self._num_slots))
        self._slots_T = None if is_dense else slots.to(device)
        self._masks: dict[tuple[int, int], Tensor] = {}
        self._longest = max(lengths)
        self._starts_S1 = _starts(lengths, device)
        segments = long_rows.cut_at_long_rows(lengths, is_ordered=is_ordered)
        self._has_long = any(segment.is_long for segment in segments)
        self._segments = [(segment, _starts(segment.lengths, device)) for segment in segments if self._has_long]

    def computed_tokens(self, query: Tensor) -> int:
        """Slots that attention of such queries goes over, padding included."""
        return len(query) if self._is_varlen(query, None) else self._num_slots

    def _is_varlen(self, query: Tensor, window: int | None) -> bool:
        """Rows of one length need no padding, and plain attention no starts; but it would hold a mask for a window."""
        is_padded = self._slots_T is not None
        has_mask = window is not None and window < self._longest
        return (is_padded or has_mask) and varlen.has_kernel(query)

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, sliding_window: int | None
    ) -> Tensor:
        has_window = sliding_window is not None and sliding_window < self._longest
        if self._has_long and not has_window and varlen.has_kernel(query):
            return self._by_segment(query, key, value, scaling)
        if self._is_varlen(query, sliding_window):
            output = varlen.varlen_attention(
                query, key, value, self._starts_S1, longest=self._longest, scaling=scaling, window=sliding_window
            )
            if self._is_ordered:
                order_gradients(output)
            return output

        def attend(*padded: Tensor) -> Tensor:
            mask = self._window_mask(padded[0].shape[1], sliding_window, query.device)
            q, k, v = (tensor.transpose(1, 2) for tensor in padded)  # views: the kernels take any stride
            output = _attend(q, k, v, mask, scaling)
            if self._is_ordered and output.is_cuda:
                order_gradients(output)
            return output.transpose(1, 2)

        return self.by_bucket(query, key, value, attend)

    def _by_segment(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Long rows one by one, those between them together."""
        outputs = []
        # Split, not sliced: the gradient of a slice is a tensor of all tokens, filled with zeros around it.
        sizes = [sum(segment.lengths) for segment, _ in self._segments]
        parts = zip(*(torch.split(tensor, sizes) for tensor in (query, key, value)), strict=True)
        for (segment, starts), (q, k, v) in zip(self._segments, parts, strict=True):
            if segment.is_long:
                output = long_rows.attend_row(q, k, v, scaling=scaling, is_ordered=self._is_ordered)
            else:
                longest = max(segment.lengths)
                output = varlen.varlen_attention(q, k, v, starts, longest=longest, scaling=scaling, window=None)
            if self._is_ordered:
                order_gradients(output)
            outputs.append(output)
        return torch.cat(outputs)

    def by_bucket(self, query: Tensor, key: Tensor, value: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """attend(query, key, value), each [S, L, heads, D], for every bucket of padded rows."""
        queries, keys, values = (self._pad(tensor) for tensor in (query, key, value))
        outputs, start = [], 0
        for rows, longest in self._buckets:
            stop = start + rows * longest
            padded = (t[start:stop].view(rows, longest, *t.shape[1:]) for t in (queries, keys, values))
            outputs.append(attend(*padded).flatten(0, 1))
            start = stop
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined if self._slots_T is None else take_rows(joined, self._slots_T)

    def _pad(self, tensor_T: Tensor) -> Tensor:
        return tensor_T if self._slots_T is None else place_rows(tensor_T, self._slots_T, self._num_slots)

    def _window_mask(self, longest: int, window: int | None, device: torch.device) -> Tensor | None:
        """True where a token sees another: itself and the window - 1 before it. None: plain causal is the same."""
        if window is None or window >= longest:
            return None
        if (longest, window) not in self._masks:
            ones = torch.ones(longest, longest, dtype=torch.bool, device=device)
            self._masks[longest, window] = ones.tril().triu(1 - window)
        return self._masks[longest, window]


def _starts(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Where rows start, and the end."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


class ExactPackedAttention:
    """The engine's `exact` arithmetic over packed rows, with the slope of the plain one."""

    def __init__(self, lengths: Sequence[int], device: torch.device, *, is_ordered: bool = False) -> None:
        self._plain = PackedAttention(lengths, device, is_ordered=is_ordered)
        starts = torch.tensor([0, *lengths]).cumsum(0)
        self._starts_S1 = starts.to(device)
        self._longest = max(lengths)

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, sliding_window: int | None
    ) -> Tensor:
        with torch.no_grad():
            exact = self._forward(query, key, value, scaling, sliding_window)
        if not torch.is_grad_enabled():
            return exact
        plain = self._plain(layer, query, key, value, scaling=scaling, sliding_window=sliding_window)
        return exact + (plain - plain.detach())  # adds exactly zero, and a gradient

    def _forward(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
        if query.is_cuda:
            from temper.models.kernels.tiled_attention import packed_attention

            return packed_attention(
                query, key, value, self._starts_S1, scaling=scaling, sliding_window=window, longest=self._longest
            )
        return self._plain.by_bucket(query, key, value, partial(_attend_exactly, scaling=scaling, window=window))


def _attend_exactly(query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None) -> Tensor:
    """[S, L, H, D]."""
    positions_SL = torch.arange(query.shape[1]).expand(query.shape[:2])
    return exact_attention(query, key, value, positions_SL, scaling, window)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """[S, H, L, D]. None as mask: causal."""
    if lacks_products(query):
        wide = query.float(), key.float(), value.float()
        return _attend(*wide, mask, scaling).to(query.dtype)
    queries_per_key = query.shape[1] // key.shape[1]
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    if query.is_cuda and queries_per_key > 1 and not (is_half and mask is None):
        # Only the flash kernel shares keys between query heads; the others would fall back to one that holds [L, L].
        key, value = (tensor.repeat_interleave(queries_per_key, dim=1) for tensor in (key, value))
    is_grouped = query.shape[1] != key.shape[1]
    # Not cuDNN's kernels, which torch may prefer: they are planned anew, and slowly, for every shape of a microbatch.
    with sdpa_kernel(KERNELS) if query.is_cuda else nullcontext():
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=is_grouped
        )


def order_gradients(output: Tensor) -> None:
    """Lets the attention kernel behind `output` add up its gradients in a fixed order, where torch has such a one.

    From about 128 keys on, torch's fast kernels add up the gradient of the queries as blocks of keys happen to end, and
    two equal runs differ in their last bits. They read a switch of the whole process, which is therefore on only while
    such a kernel is started: other threads that use torch just then might be refused what has no fixed order, so this
    is for trainers that nothing runs beside.
    """
    node = output.grad_fn
    for _ in range(WRAPPINGS):
        if node is None or "Attention" in node.name():
            break
        node = node.next_functions[0][0] if node.next_functions else None
    if node is None or "Attention" not in node.name() or torch.are_deterministic_algorithms_enabled():
        return

    def switch(*_: object, is_on: bool) -> None:
        torch.utils.deterministic.fill_uninitialized_memory = not is_on  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(is_on)

    node.register_prehook(partial(switch, is_on=True))
    node.register_hook(partial(switch, is_on=False))


def lay_out(lengths: Sequence[int]) -> tuple[list[tuple[int, int]], Tensor]:
    """Buckets of (rows, padded length), and the padded slot of each packed token.

    A bucket holds rows longer than half its longest: one row of 4,096 tokens among two hundred of 20 would
    otherwise be padded to a hundred times their size.
    """
    lengths_S = torch.tensor(lengths, dtype=torch.long)
    order = torch.argsort(lengths_S, descending=True, stable=True)
    sorted_lengths = lengths_S[order]
    buckets: list[tuple[int, int]] = []
    row_starts_S = torch.empty_like(lengths_S)
    first = slot = 0
    while first < len(lengths):
        longest = int(sorted_lengths[first])
        rows = int((sorted_lengths[first:] * 2 > longest).sum())
        row_starts_S[order[first : first + rows]] = slot + torch.arange(rows) * longest
        buckets.append((rows, longest))
        first, slot = first + rows, slot + rows * longest
    packed_starts_S = lengths_S.cumsum(0) - lengths_S
    shifts_T = torch.repeat_interleave(row_starts_S - packed_starts_S, lengths_S)
    return buckets, torch.arange(len(shifts_T)) + shifts_T
