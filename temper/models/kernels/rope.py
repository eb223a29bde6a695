"""Rotary positions: query and key of packed tokens turned in one launch, with gradients, or straight into the cache.

Owns: the half-rotation of Hugging Face (column i with column i + D/2). Refuses: partial rotary; the caller checks.
Every value is computed in float32 and rounded once. Shapes: T packed tokens, H query heads, K key heads, D head size.
"""
# Triton has no types, and its kernels are not Python functions.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable


@triton.jit
def turn_heads(
    x_ptr, out_ptr, cos_ptr, sin_ptr, keep,
    HEADS: tl.constexpr, HALF: tl.constexpr, HEAD_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
    INVERSE: tl.constexpr,
):  # fmt: skip
    """One token's heads, [HEADS, 2 * HALF] without gaps at both pointers; nothing is written unless `keep`."""
    dtype = x_ptr.dtype.element_ty
    head, column = tl.arange(0, HEAD_BLOCK)[:, None], tl.arange(0, HALF_BLOCK)[None, :]
    inside = column < HALF
    place, mask = head * (2 * HALF) + column, (head < HEADS) & inside & keep
    low = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(x_ptr + place + HALF, mask=mask, other=0.0).to(tl.float32)
    cos_low = tl.load(cos_ptr + column, mask=inside, other=0.0).to(tl.float32)
    cos_high = tl.load(cos_ptr + column + HALF, mask=inside, other=0.0).to(tl.float32)
    sin_low = tl.load(sin_ptr + column, mask=inside, other=0.0).to(tl.float32)
    sin_high = tl.load(sin_ptr + column + HALF, mask=inside, other=0.0).to(tl.float32)
    if INVERSE:  # the transpose: the angle's sign flips, and each half takes the sine its partner had
        new_low, new_high = low * cos_low + high * sin_high, high * cos_high - low * sin_low
    else:
        new_low, new_high = low * cos_low - high * sin_low, high * cos_high + low * sin_high
    # Rounded to the input's dtype first: a cache of another dtype must hold what the trainer's attention sees.
    tl.store(out_ptr + place, new_low.to(dtype), mask=mask)
    tl.store(out_ptr + place + HALF, new_high.to(dtype), mask=mask)


@triton.jit
def rotate_tokens(
    query_ptr, key_ptr, cos_ptr, sin_ptr, query_out_ptr, key_out_ptr, query_stride, key_stride,
    H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr,
    H_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    cos_ptr += token * (2 * HALF)
    sin_ptr += token * (2 * HALF)
    turn_heads(query_ptr + token * query_stride, query_out_ptr + token * (H * 2 * HALF), cos_ptr, sin_ptr, True,
               H, HALF, H_BLOCK, HALF_BLOCK, INVERSE)  # fmt: skip
    turn_heads(key_ptr + token * key_stride, key_out_ptr + token * (K * 2 * HALF), cos_ptr, sin_ptr, True,
               K, HALF, K_BLOCK, HALF_BLOCK, INVERSE)  # fmt: skip


@triton.jit
def rotate_and_store_tokens(
    query_ptr, key_ptr, value_ptr, cos_ptr, sin_ptr, query_out_ptr, key_cache_ptr, value_cache_ptr, slots_ptr,
    query_stride, key_stride, value_stride, key_slot_stride, value_slot_stride,
    H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr,
    H_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    keep = slot >= 0
    cos_ptr += token * (2 * HALF)
    sin_ptr += token * (2 * HALF)
    turn_heads(query_ptr + token * query_stride, query_out_ptr + token * (H * 2 * HALF), cos_ptr, sin_ptr, True,
               H, HALF, H_BLOCK, HALF_BLOCK, False)  # fmt: skip
    turn_heads(key_ptr + token * key_stride, key_cache_ptr + slot * key_slot_stride, cos_ptr, sin_ptr, keep,
               K, HALF, K_BLOCK, HALF_BLOCK, False)  # fmt: skip
    head, column = tl.arange(0, K_BLOCK)[:, None], tl.arange(0, 2 * HALF_BLOCK)[None, :]
    place, mask = head * (2 * HALF) + column, (head < K) & (column < 2 * HALF) & keep
    value = tl.load(value_ptr + token * value_stride + place, mask=mask, other=0.0)
    tl.store(value_cache_ptr + slot * value_slot_stride + place, value, mask=mask)


@cache
def launch_options(heads: int, key_heads: int, head_size: int) -> dict[str, Any]:
    head_block, half_block = triton.next_power_of_2(heads), triton.next_power_of_2(head_size // 2)
    return {
        "H": heads, "K": key_heads, "HALF": head_size // 2,
        "H_BLOCK": head_block, "K_BLOCK": triton.next_power_of_2(key_heads), "HALF_BLOCK": half_block,
        # 8 elements, 16 bytes of bf16, per thread of the query's tile. Unfused products: Hugging Face's float32 bits.
        "num_warps": min(8, max(1, head_block * half_block // 256)), "enable_fp_fusion": False,
    }  # fmt: skip


def packed_heads(x: Tensor) -> Tensor:
    """x with the heads of a token side by side; the stride from token to token may be anything."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def turn(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    query, key = packed_heads(query), packed_heads(key)
    query_out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    key_out = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    if query.shape[0]:
        rotate_tokens[(query.shape[0],)](
            query, key, cos.contiguous(), sin.contiguous(), query_out, key_out, query.stride(0), key.stride(0),
            INVERSE=inverse, **launch_options(query.shape[1], key.shape[1], query.shape[2]),
        )  # fmt: skip
    return query_out, key_out


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return turn(query, key, cos, sin, inverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_query: Tensor, grad_key: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return *turn(grad_query, grad_key, cos, sin, inverse=True), None, None


def rotate(query_THD: Tensor, key_TKD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor]:
    """x * cos + rotate_half(x) * sin for query and key. No gradient flows to cos and sin."""
    if torch.is_grad_enabled() and (query_THD.requires_grad or key_TKD.requires_grad):
        return Rotate.apply(query_THD, key_TKD, cos_TD, sin_TD)
    return turn(query_THD, key_TKD, cos_TD, sin_TD, inverse=False)


def slots_of(cache: Tensor) -> Tensor:
    """A paged cache [blocks, block size, K, D] as [slots, K, D], never a copy: what is written must arrive."""
    cache = cache.view(-1, *cache.shape[2:]) if cache.dim() == 4 else cache
    assert cache.stride()[1:] == (cache.shape[2], 1), "the heads of a slot must lie side by side"
    return cache


@torch.no_grad()
def rotate_and_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots_T: Tensor,
) -> Tensor:
    """The rotated query; rotated keys and values go to their slots of the paged caches, in the same launch.

    A token with a negative slot is rotated but not stored: the padding of a captured batch.
    """
    query, key, value = packed_heads(query), packed_heads(key), packed_heads(value)
    keys, values = slots_of(key_cache), slots_of(value_cache)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if query.shape[0]:
        rotate_and_store_tokens[(query.shape[0],)](
            query, key, value, cos.contiguous(), sin.contiguous(), out, keys, values, slots_T.contiguous(),
            query.stride(0), key.stride(0), value.stride(0), keys.stride(0), values.stride(0),
            **launch_options(query.shape[1], key.shape[1], query.shape[2]),
        )  # fmt: skip
    return out
