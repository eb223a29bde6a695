"""Rotation against Hugging Face's, its inverse against autograd, and the store into a paged cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from temper.models.kernels.rope import rotate, rotate_and_store

DTYPES = [torch.float32, torch.bfloat16]
HEADS, KEY_HEADS = 9, 3


def draw(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def angles(device: torch.device, tokens: int, size: int, first: int = 0) -> tuple[Tensor, Tensor]:
    frequencies = 1.0 / 10_000 ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    half = torch.arange(first, first + tokens)[:, None] * frequencies
    whole = torch.cat((half, half), dim=-1)
    return whole.cos().float().to(device), whole.sin().float().to(device)


def hugging_face(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Packed tokens through the function that wants [batch, heads, tokens, size]."""
    turned = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos[None], sin[None])
    return turned[0][0].transpose(0, 1), turned[1][0].transpose(0, 1)


def joined_parts(joined: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return joined[:, :HEADS], joined[:, HEADS : HEADS + KEY_HEADS], joined[:, HEADS + KEY_HEADS :]


@pytest.mark.parametrize("size", [64, 80])
def test_float32_has_the_bits_of_hugging_face(device: torch.device, size: int) -> None:
    query, key, _ = joined_parts(draw(device, torch.float32, 5, HEADS + 2 * KEY_HEADS, size))
    cos, sin = angles(device, 5, size, first=1000)
    for ours, theirs in zip(rotate(query, key, cos, sin), hugging_face(query, key, cos, sin), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.is_contiguous()
    wrong_way, _ = hugging_face(query, key, cos, -sin)
    assert not torch.allclose(rotate(query, key, cos, sin)[0], wrong_way, atol=0.1)


@pytest.mark.parametrize("angle_dtype", DTYPES)
def test_bf16_is_the_exact_rotation_rounded_once(device: torch.device, angle_dtype: torch.dtype) -> None:
    query, key, _ = joined_parts(draw(device, torch.bfloat16, 5, HEADS + 2 * KEY_HEADS, 64))
    cos, sin = (part.to(angle_dtype) for part in angles(device, 5, 64))
    exact = hugging_face(query.float(), key.float(), cos.float(), sin.float())
    theirs = hugging_face(query, key, cos.bfloat16(), sin.bfloat16())
    for ours, once, thrice in zip(rotate(query, key, cos, sin), exact, theirs, strict=True):
        assert torch.equal(ours, once.bfloat16())
        assert torch.allclose(ours.float(), thrice.float(), rtol=2**-7, atol=0.04)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_the_transposed_rotation(device: torch.device, dtype: torch.dtype) -> None:
    joined = draw(device, dtype, 4, HEADS + 2 * KEY_HEADS, 64)
    # Unrelated numbers in all four tables: the halves of real ones are equal and would hide a swap.
    cos, sin = draw(device, torch.float32, 4, 64), draw(device, torch.float32, 5, 64)[:4]
    upstream = [draw(device, dtype, 4, heads, 64) for heads in (HEADS, KEY_HEADS)]
    leaf, exact_leaf = joined.clone().requires_grad_(), joined.double().requires_grad_()
    (ours,) = torch.autograd.grad(rotate(*joined_parts(leaf)[:2], cos, sin), leaf, upstream)
    exact_outputs = hugging_face(*joined_parts(exact_leaf)[:2], cos.double(), sin.double())
    (exact,) = torch.autograd.grad(exact_outputs, exact_leaf, [part.double() for part in upstream])
    precision = 1e-6 if dtype == torch.float32 else 2**-8
    assert torch.allclose(ours.double(), exact, rtol=precision, atol=precision)


@pytest.mark.parametrize("dtype", DTYPES)
def test_turning_back_undoes_the_turn(device: torch.device, dtype: torch.dtype) -> None:
    query, key = draw(device, dtype, 3, HEADS, 64).requires_grad_(), draw(device, dtype, 3, 1, 64)
    cos, sin = angles(device, 3, 64, first=7)
    turned, _ = rotate(query, key, cos, sin)
    (back,) = torch.autograd.grad(turned, query, turned.detach())
    assert torch.allclose(back, query, atol=1e-6 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_and_company_change_no_bit(device: torch.device, dtype: torch.dtype) -> None:
    joined = draw(device, dtype, 64, HEADS + 2 * KEY_HEADS, 64)
    query, key, _ = joined_parts(joined)
    cos, sin = angles(device, 64, 64)
    whole = rotate(query.contiguous(), key.contiguous(), cos, sin)
    for start, count in [(0, 1), (41, 1), (57, 7)]:
        part = slice(start, start + count)
        by_head = [x[part].transpose(0, 1).contiguous().transpose(0, 1) for x in (query, key)]
        for pair in ((query[part], key[part]), by_head):
            turned = rotate(*pair, cos[part], sin[part])
            assert torch.equal(turned[0], whole[0][part])
            assert torch.equal(turned[1], whole[1][part])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 80])
def test_keys_and_values_land_in_their_slots(device: torch.device, dtype: torch.dtype, size: int) -> None:
    query, key, value = joined_parts(draw(device, dtype, 4, HEADS + 2 * KEY_HEADS, size))
    cos, sin = angles(device, 4, size)
    # One block more in front: a write to slot -1 would land there and be seen.
    memory = torch.full((6, 2, 2, KEY_HEADS, size), 7.0, dtype=dtype, device=device)
    key_cache, value_cache = memory[1:, :, 0], memory[1:, :, 1]
    slots = torch.tensor([9, 2, -1, 0], device=device)
    turned_query, turned_key = rotate(query, key, cos, sin)
    assert torch.equal(rotate_and_store(query, key, value, cos, sin, key_cache, value_cache, slots), turned_query)
    expected = torch.full_like(memory, 7.0)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[1 + slot // 2, slot % 2, 0], expected[1 + slot // 2, slot % 2, 1] = turned_key[token], value[token]
    assert torch.equal(memory, expected)
    keys, values = (torch.zeros(11, KEY_HEADS, size, dtype=dtype, device=device)[1:] for _ in range(2))
    rotate_and_store(query, key, value, cos, sin, keys, values, slots)
    assert torch.equal(keys[9], turned_key[0])
    assert torch.equal(values[2], value[1])


def test_a_cache_that_cannot_be_written_in_place_is_refused(device: torch.device) -> None:
    query, key, value = joined_parts(draw(device, torch.float32, 2, HEADS + 2 * KEY_HEADS, 64))
    slots = torch.arange(2, device=device)
    by_head = torch.zeros(4, KEY_HEADS, 2, 64, device=device).transpose(1, 2)
    with pytest.raises((RuntimeError, AssertionError)):
        rotate_and_store(query, key, value, *angles(device, 2, 64), by_head, by_head, slots)


def test_no_tokens_are_fine(device: torch.device) -> None:
    query, key, value = joined_parts(torch.empty(0, HEADS + 2 * KEY_HEADS, 64, device=device).requires_grad_())
    cos, sin = angles(device, 0, 64)
    turned_query, turned_key = rotate(query, key, cos, sin)
    assert (turned_query.shape, turned_key.shape) == ((0, HEADS, 64), (0, KEY_HEADS, 64))
    (turned_query.sum() + turned_key.sum()).backward()
    cache = torch.zeros(2, 2, KEY_HEADS, 64, device=device)
    slots = torch.empty(0, dtype=torch.int64, device=device)
    assert rotate_and_store(query, key, value, cos, sin, cache, cache, slots).shape == (0, HEADS, 64)
