"""Drawing tokens and their log-probabilities from rows of float32 logits, in Triton: two launches, any vocabulary.

Owns: the bits of a log-probability on the GPU. What `draw_tokens` reports and what `token_logprobs` recomputes come
from the same two compiled kernels, so they are equal for equal logits, whatever the other rows are.
Refuses: truncation (top-k, top-p, min-p) and host synchronisation.
Shapes: _R rows, _V vocabulary, _B blocks of the vocabulary, _E entries of one block.
"""
# Triton has no types, and its kernels are not Python functions.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Entries of a vocabulary block, always: sums within and over blocks then have one order per vocabulary size."""
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX2 = tl.constexpr(0x94D049BB133111EB)


def draw_tokens(
    logits_RV: Tensor, temperature_R: Tensor, random_key_R: Tensor, position_R: Tensor
) -> tuple[Tensor, Tensor]:
    """One token per row (int64) and its log-probability after temperature (float32).

    The uniform number is that of the engine's `uniforms` for (random_key, position), to the bit; keys are int64 views
    of unsigned numbers. Temperature 0 takes the most likely token, the lowest id of equals, with its log-probability
    at temperature 1.
    """
    tokens_R, logprobs_R, _, _ = _finish(logits_RV, temperature_R, random_key_R, position_R, None)
    return tokens_R, logprobs_R


def keep_drawn(
    drawn_R: Tensor, logprobs_R: Tensor, drawn_SR: Tensor, logprobs_SR: Tensor, tokens_R: Tensor, positions_R: Tensor,
    step: Tensor,
) -> None:  # fmt: skip
    """Writes what was drawn into line `step` of both tables, gives it to the next step as its tokens, and moves
    positions and step on by one. Past the last line it begins anew: recording runs a step more often than there are
    lines."""
    num_rows = len(drawn_R)
    assert drawn_SR.stride() == logprobs_SR.stride()
    _keep_kernel[(1,)](
        drawn_R, logprobs_R, drawn_SR, logprobs_SR, tokens_R, positions_R, step, num_rows, len(drawn_SR),
        drawn_SR.stride(0), BLOCK=1024, num_warps=4,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_rows", "num_steps", "stride"],
    do_not_specialize_on_alignment=["drawn", "logprobs", "tokens", "positions"],
)
def _keep_kernel(
    drawn, logprobs, drawn_table, logprobs_table, tokens, positions, step, num_rows, num_steps, stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program, so that nobody reads the step after it has moved on."""
    now = tl.load(step)
    line = (now % num_steps) * stride
    for start in range(0, num_rows, BLOCK):
        row_B = start + tl.arange(0, BLOCK)
        mask = row_B < num_rows
        token_B = tl.load(drawn + row_B, mask=mask)
        tl.store(drawn_table + line + row_B, token_B, mask=mask)
        tl.store(logprobs_table + line + row_B, tl.load(logprobs + row_B, mask=mask), mask=mask)
        tl.store(tokens + row_B, token_B, mask=mask)
        tl.store(positions + row_B, tl.load(positions + row_B, mask=mask) + 1, mask=mask)
    tl.store(step, now + 1)


def token_logprobs(logits_CV: Tensor, token_ids_C: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of given tokens: the bits that `draw_tokens` reports when it draws them."""
    return _finish(logits_CV, _one_for_all(logits_CV, temperature), token_ids_C, token_ids_C, token_ids_C)[1]


def log_normalizers(logits_RV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(maximum, log-sum) per row: the log-probability of token v is (logits[v] - maximum) / temperature - log-sum."""
    ids_R = torch.zeros(len(logits_RV), dtype=torch.int64, device=logits_RV.device)
    _, _, maximum_R, logsum_R = _finish(logits_RV, _one_for_all(logits_RV, temperature), ids_R, ids_R, ids_R)
    return maximum_R, logsum_R


def _one_for_all(logits_RV: Tensor, temperature: float) -> Tensor:
    one = torch.full((1,), temperature, dtype=torch.float32, device=logits_RV.device)
    return one.expand(len(logits_RV))


def _finish(
    logits_RV: Tensor, temperature_R: Tensor, random_key_R: Tensor, position_R: Tensor, given_R: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens (drawn, or those given), log-probabilities, maxima and log-sums."""
    num_rows, num_words = logits_RV.shape
    assert logits_RV.dtype == temperature_R.dtype == torch.float32
    assert logits_RV.stride(1) == 1
    assert random_key_R.dtype == position_R.dtype == torch.int64
    assert random_key_R.is_contiguous()
    assert position_R.is_contiguous()
    device, num_blocks = logits_RV.device, triton.cdiv(num_words, BLOCK)
    statistics = torch.empty((2, num_rows, num_blocks), dtype=torch.float32, device=device)
    best_RB = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=device)
    tokens_R = torch.empty(num_rows, dtype=torch.int64, device=device)
    results = torch.empty((3, num_rows), dtype=torch.float32, device=device)
    if num_rows == 0:
        return tokens_R, results[0], results[1], results[2]
    strides = (logits_RV.stride(0), temperature_R.stride(0))
    _blocks_kernel[(num_rows, num_blocks)](
        logits_RV, temperature_R, statistics, best_RB, *strides, num_words, BLOCK=BLOCK, num_warps=4
    )
    _row_kernel[(num_rows,)](
        logits_RV, temperature_R, random_key_R, position_R, random_key_R if given_R is None else given_R,
        statistics, best_RB, tokens_R, results, *strides, num_words, num_blocks, int(given_R is not None),
        BLOCKS=triton.next_power_of_2(num_blocks), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return tokens_R, results[0], results[1], results[2]


# A kernel compiled anew for another alignment or stride may sum in another order. So nothing is specialised on what
# differs between engine and trainer, and one kernel serves drawn and given tokens.


@triton.jit
def _load_temperature(temperature, row, temperature_stride):
    """(divisor, is greedy)."""
    value = tl.load(temperature + row * temperature_stride)
    return tl.where(value == 0.0, 1.0, value), value == 0.0


@triton.jit(do_not_specialize=["logits_stride", "temperature_stride"], do_not_specialize_on_alignment=["logits"])
def _blocks_kernel(
    logits, temperature, statistics, best, logits_stride, temperature_stride, num_words, BLOCK: tl.constexpr
):
    """Computes for one block of one row the maximum, where it is, and the sum of exponentials relative to it."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    divisor, _ = _load_temperature(temperature, row, temperature_stride)
    word_E = block * BLOCK + tl.arange(0, BLOCK)
    logit_E = tl.load(logits + row * logits_stride + word_E, mask=word_E < num_words, other=float("-inf"))
    maximum, place = tl.max(logit_E, 0, return_indices=True)
    # A block of impossible words alone: -inf - -inf would be NaN.
    finite = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.sum(tl.exp((logit_E - finite) / divisor), 0)
    target = row * tl.num_programs(1) + block
    tl.store(statistics + target, maximum)
    tl.store(statistics + tl.num_programs(0).to(tl.int64) * tl.num_programs(1) + target, total)
    tl.store(best + target, block * BLOCK + place)


@triton.jit
def _uniform(random_key, position):
    """splitmix64 of the key advanced by the position; 24 bits, all that a float32 below 1 can hold."""
    x = random_key.to(tl.uint64) + (position.to(tl.uint64) + 1) * _GOLDEN
    x = (x ^ (x >> 30)) * _MIX1
    x = (x ^ (x >> 27)) * _MIX2
    x = x ^ (x >> 31)
    return (x >> 40).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def _first_above(weight_E, target, otherwise, ENTRIES: tl.constexpr):
    """The first entry at which the running sum exceeds the target, and never one of weight 0; else `otherwise`."""
    entry_E = tl.arange(0, ENTRIES)
    is_above_E = (tl.cumsum(weight_E, 0) > target) & (weight_E > 0.0)
    first = tl.min(tl.where(is_above_E, entry_E, ENTRIES), 0)
    return tl.where(first == ENTRIES, otherwise, first)


@triton.jit(
    do_not_specialize=["logits_stride", "temperature_stride", "is_given"],
    do_not_specialize_on_alignment=["logits", "random_key", "position", "given"],
)
def _row_kernel(
    logits, temperature, random_key, position, given, statistics, best, tokens, results,
    logits_stride, temperature_stride, num_words, num_blocks, is_given,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Combines the blocks of one row, then picks a block and a word in it by running sums of the same weights."""
    row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0).to(tl.int64)
    divisor, is_greedy = _load_temperature(temperature, row, temperature_stride)
    block_B = tl.arange(0, BLOCKS)
    is_block_B = block_B < num_blocks
    source_B = row * num_blocks + block_B
    maximum_B = tl.load(statistics + source_B, mask=is_block_B, other=float("-inf"))
    total_B = tl.load(statistics + num_rows * num_blocks + source_B, mask=is_block_B, other=0.0)
    maximum = tl.max(maximum_B, 0)
    weight_B = total_B * tl.exp((maximum_B - maximum) / divisor)
    total = tl.sum(weight_B, 0)

    # Rounding can leave the target above every running sum; the likeliest word is then the harmless choice.
    likeliest = tl.min(tl.where((maximum_B == maximum) & is_block_B, block_B, num_blocks - 1), 0)
    target = _uniform(tl.load(random_key + row), tl.load(position + row)) * total
    block = _first_above(weight_B, target, likeliest, BLOCKS)
    before = tl.sum(tl.where(block_B < block, weight_B, 0.0), 0)
    word_E = block * BLOCK + tl.arange(0, BLOCK)
    logit_E = tl.load(logits + row * logits_stride + word_E, mask=word_E < num_words, other=float("-inf"))
    best_inside = tl.load(best + row * num_blocks + block) - block * BLOCK
    inside = _first_above(tl.exp((logit_E - maximum) / divisor), target - before, best_inside, BLOCK)
    drawn = tl.where(is_greedy, tl.load(best + row * num_blocks + likeliest), block * BLOCK + inside)
    token = tl.where(is_given != 0, tl.load(given + row), drawn.to(tl.int64))
    token = tl.minimum(token, num_words - 1)  # a row of NaN must not read past the end

    logsum = tl.log(total)
    logit = tl.load(logits + row * logits_stride + token)
    tl.store(tokens + row, token)
    tl.store(results + row, (logit - maximum) / divisor - logsum)
    tl.store(results + num_rows + row, maximum)
    tl.store(results + 2 * num_rows + row, logsum)
