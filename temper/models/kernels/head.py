"""Entropy and gradient of rows of float32 logits in one reading each, in Triton. Draws are in draw.py.

Owns: what the trainer takes from logits beside log-probabilities. A row's result depends on that row alone.
Refuses: keep-sets and most likely tokens (trainer/passes/logprobs.py has torch for those).
Shapes: _R rows, _V vocabulary, _E entries of one block of it.
"""
# Triton has no types, and its kernels are not Python functions.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
_LEAST = tl.constexpr(-3.0e38)
"""Zero probability times minus infinity would be NaN; times this it is zero."""


def entropies(logits_RV: Tensor, normalizer_R: Tensor, temperature: float) -> Tensor:
    """[R] entropy, with log p = logits / temperature - normalizer."""
    num_rows, num_words = logits_RV.shape
    entropy_R = torch.empty(num_rows, dtype=torch.float32, device=logits_RV.device)
    if num_rows:
        _entropy_kernel[(num_rows,)](
            logits_RV, normalizer_R, entropy_R, logits_RV.stride(0), temperature, num_words, BLOCK=BLOCK, num_warps=8
        )
    return entropy_R


def logits_gradient(
    logits_RV: Tensor,
    token_ids_R: Tensor,
    normalizer_R: Tensor,
    grad_logprobs_R: Tensor | None,
    entropy: tuple[Tensor, Tensor | None],
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """d/dlogits of sum g log p[token] + h H: (g (onehot - p) - h p (log p + H)) / temperature, in `dtype`.

    `entropy`: H, and its gradient h when something differentiates it.
    """
    num_rows, num_words = logits_RV.shape
    grad_RV = torch.empty((num_rows, num_words), dtype=dtype, device=logits_RV.device)
    entropy_R, grad_entropy_R = entropy
    if grad_logprobs_R is None:
        grad_logprobs_R = torch.zeros_like(entropy_R)
    if num_rows:
        _gradient_kernel[(num_rows, triton.cdiv(num_words, BLOCK))](
            logits_RV, token_ids_R, normalizer_R, grad_logprobs_R.contiguous(), entropy_R,
            entropy_R if grad_entropy_R is None else grad_entropy_R.contiguous(), grad_RV,
            logits_RV.stride(0), temperature, num_words,
            HAS_ENTROPY=grad_entropy_R is not None, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return grad_RV


# A row reads one number of each of these: where a chunk of rows begins does not matter, and must not compile anew.


@triton.jit(do_not_specialize_on_alignment=["normalizer", "entropy"])
def _entropy_kernel(logits, normalizer, entropy, logits_stride, temperature, num_words, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    shift = tl.load(normalizer + row)
    sums_E = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, num_words, BLOCK):
        word_E = start + tl.arange(0, BLOCK)
        logit_E = tl.load(logits + row * logits_stride + word_E, mask=word_E < num_words, other=float("-inf"))
        logprob_E = logit_E / temperature - shift
        sums_E -= tl.exp(logprob_E) * tl.maximum(logprob_E, _LEAST)
    tl.store(entropy + row, tl.sum(sums_E, 0))


@triton.jit(do_not_specialize_on_alignment=["tokens", "normalizer", "grad_logprobs", "entropy", "grad_entropy"])
def _gradient_kernel(
    logits, tokens, normalizer, grad_logprobs, entropy, grad_entropy, grad,
    logits_stride, temperature, num_words, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    word_E = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_word_E = word_E < num_words
    logit_E = tl.load(logits + row * logits_stride + word_E, mask=is_word_E, other=float("-inf"))
    logprob_E = logit_E / temperature - tl.load(normalizer + row)
    given = tl.load(grad_logprobs + row)
    scale_E = tl.zeros([BLOCK], dtype=tl.float32) - given
    if HAS_ENTROPY:
        scale_E -= tl.load(grad_entropy + row) * (tl.maximum(logprob_E, _LEAST) + tl.load(entropy + row))
    grad_E = tl.exp(logprob_E) * scale_E + tl.where(word_E == tl.load(tokens + row), given, 0.0)
    tl.store(grad + row * num_words + word_E, (grad_E / temperature).to(grad.dtype.element_ty), mask=is_word_E)
