"""Packed attention equals rows run one by one, in value and gradient, and keeps rows apart to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from temper.models.states import hidden_states
from temper.trainer.passes.packed_attention import PackedAttention, lay_out

CPU = torch.device("cpu")


def test_padding_is_at_most_doubled_and_every_token_has_its_own_slot() -> None:
    for lengths in ([4096] + [20] * 200, [1], [5, 5, 5], [3, 17, 9, 8, 1, 2]):
        buckets, slots_T = lay_out(lengths)
        num_slots = sum(rows * longest for rows, longest in buckets)
        assert sum(rows for rows, _ in buckets) == len(lengths)
        assert num_slots < 2 * sum(lengths)
        assert len(set(slots_T.tolist())) == sum(lengths)
        assert slots_T.max() < num_slots


def test_a_row_stays_contiguous_in_its_bucket() -> None:
    _, slots_T = lay_out([2, 9, 3, 8])
    for start, length in ((0, 2), (2, 9), (11, 3), (14, 8)):
        assert slots_T[start : start + length].diff().eq(1).all()


@pytest.mark.parametrize("lengths", [[5, 9, 3, 1, 12, 11], [6, 6, 6], [7]])
def test_packed_pass_equals_transformers_row_by_row(
    make_model: Callable[..., Any], family: str, lengths: list[int]
) -> None:
    plain, packed = make_model(family, is_plain=True), make_model(family)
    rows = [torch.randint(40, (length,), generator=torch.Generator().manual_seed(length)) for length in lengths]
    expected = torch.cat([plain.get_decoder()(row[None]).last_hidden_state[0] for row in rows])
    positions = torch.cat([torch.arange(length) for length in lengths])
    found = hidden_states(packed, torch.cat(rows), positions, PackedAttention(lengths, CPU))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)

    cotangent = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(0))
    (found * cotangent).sum().backward()
    (expected * cotangent).sum().backward()
    for (name, ours), (_, theirs) in zip(packed.named_parameters(), plain.named_parameters(), strict=True):
        if theirs.grad is not None:
            # Gemma's norms sum their own gradient in float32, whatever the model's precision.
            budget = 1e-5 if family == "gemma3" and "norm" in name else 1e-9
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=budget, atol=budget, msg=name)


def test_sliding_window_sees_itself_and_the_tokens_before_it() -> None:
    # Values 2^position with equal scores: the output is the mean of what is visible.
    value = (2.0 ** torch.arange(6.0)).reshape(6, 1, 1)
    nothing = torch.zeros(6, 1, 1)
    output = PackedAttention([6], CPU)(0, nothing, nothing, value, scaling=1.0, sliding_window=3)
    expected = [1, 3 / 2, 7 / 3, 14 / 3, 28 / 3, 56 / 3]
    torch.testing.assert_close(output.flatten(), torch.tensor(expected))


def test_a_window_as_long_as_the_row_is_plain_causal_attention() -> None:
    query, key, value = (torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(s)) for s in range(3))
    attend = PackedAttention([5], CPU)
    with_window = attend(0, query, key, value, scaling=0.5, sliding_window=5)
    assert torch.equal(with_window, attend(0, query, key, value, scaling=0.5, sliding_window=None))


@pytest.mark.parametrize("window", [None, 4])
def test_changing_one_row_leaves_the_others_unchanged_to_the_bit(window: int | None) -> None:
    lengths, changed = [5, 9, 3, 7], slice(5, 14)
    inputs = [torch.randn(24, 2, 8, generator=torch.Generator().manual_seed(s)) for s in range(3)]
    attend = PackedAttention(lengths, CPU)
    before = attend(0, *inputs, scaling=0.3, sliding_window=window)
    for tensor in inputs:
        tensor[changed] += 1
    after = attend(0, *inputs, scaling=0.3, sliding_window=window)
    is_other = torch.ones(24, dtype=torch.bool)
    is_other[changed] = False
    assert torch.equal(before[is_other], after[is_other])
    assert not torch.equal(before[changed], after[changed])
