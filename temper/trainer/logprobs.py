"""Log-probability and entropy of drawn tokens, without ever holding logits of all of them.

Logits exist for one chunk of rows at a time and are computed again in the backward pass. A hand-written backward rather
than checkpointing: it needs one chunk of logits instead of three, and one gradient of the head instead of two.
Owns: the head's arithmetic in training. Refuses: which tokens are scored by which hidden state (forward.py).
Shapes: _A drawn tokens, _C those of one chunk, _D width, _V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from temper.models.load import Head

CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
"""Logits held at once, two to three times over. A GPU would gain a tenth more from four times as much."""


def drawn_logprobs(
    head: Head, hidden_AD: Tensor, token_ids_A: Tensor, *, temperature: float, chunk_bytes: int | None = None
) -> tuple[Tensor, Tensor]:
    """log softmax(head(hidden) / temperature)[token], and the entropy of the same distribution.

    Both carry a gradient; that of the entropy costs nothing until something differentiates it.
    """
    if chunk_bytes is None:
        chunk_bytes = CHUNK_BYTES.get(hidden_AD.device.type, CHUNK_BYTES["cpu"])
    row_bytes = head.weight.shape[0] * head.weight.element_size()
    settings = (head.softcap, temperature, max(1, chunk_bytes // row_bytes))
    return _DrawnLogprobs.apply(hidden_AD, head.weight, head.bias, token_ids_A, settings)  # type: ignore[no-untyped-call]


class _DrawnLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_AD: Tensor, weight: Tensor, bias: Tensor | None, token_ids_A: Tensor, settings: Any
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.settings = settings
        softcap, temperature, chunk_rows = settings
        head = Head(weight, bias, softcap)
        logprobs_A = torch.empty(len(token_ids_A), dtype=weight.dtype, device=weight.device)
        entropy_A = torch.empty_like(logprobs_A)
        for rows in _chunks(len(token_ids_A), chunk_rows):
            with _tensor_cores(hidden_AD.dtype):
                logits_CV = _tempered(head.logits(hidden_AD[rows]), temperature)
            logprobs_CV = torch.log_softmax(logits_CV, dim=-1)
            del logits_CV
            logprobs_A[rows] = logprobs_CV.gather(1, token_ids_A[rows, None])[:, 0]
            entropy_A[rows] = -logprobs_CV.exp().mul_(logprobs_CV).sum(-1)
        ctx.save_for_backward(hidden_AD, weight, bias, token_ids_A, logprobs_A, entropy_A)
        return logprobs_A, entropy_A

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden_AD, weight, bias, token_ids_A, logprobs_A, entropy_A = ctx.saved_tensors
        softcap, temperature, chunk_rows = ctx.settings
        head = Head(weight, bias, softcap)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden_AD) if wants_hidden else None
        grad_weight = torch.zeros_like(weight) if wants_weight else None
        grad_bias = torch.zeros_like(bias) if wants_bias else None
        for rows in _chunks(len(token_ids_A), chunk_rows):
            with _tensor_cores(hidden_AD.dtype):
                logits_CV = _tempered(head.logits(hidden_AD[rows]), temperature)
            # What the softcap let through of a change in the raw logit; taken before the logits are overwritten.
            slope_CV = None if softcap is None else 1 - (logits_CV * (temperature / softcap)).square_()
            chunk_grads = (None if grad_A is None else grad_A[rows] for grad_A in grads)
            grad_CV = _grad_logits(logits_CV, token_ids_A[rows], logprobs_A[rows], entropy_A[rows], *chunk_grads)
            _tempered(grad_CV, temperature)
            if slope_CV is not None:
                grad_CV *= slope_CV
            with _tensor_cores(hidden_AD.dtype):
                if grad_hidden is not None:
                    grad_hidden[rows] = (grad_CV @ weight).to(hidden_AD.dtype)
                if grad_weight is not None:
                    grad_weight.addmm_(grad_CV.t(), hidden_AD[rows].to(weight.dtype))
            if grad_bias is not None:
                grad_bias += grad_CV.sum(0)
        return grad_hidden, grad_weight, grad_bias, None, None


def _grad_logits(
    logits_CV: Tensor,
    token_ids_C: Tensor,
    logprobs_C: Tensor,
    entropy_C: Tensor,
    grad_logprobs_C: Tensor | None,
    grad_entropy_C: Tensor | None,
) -> Tensor:
    """d/dz of g log p[token] + h H: g (onehot - p) - h p (log p + H). Overwrites the logits."""
    chosen_C1 = token_ids_C[:, None]
    # The normaliser follows from what the forward pass kept; no second reduction over the vocabulary.
    normalizer_C1 = logits_CV.gather(1, chosen_C1) - logprobs_C[:, None]
    logits_CV -= normalizer_C1
    if grad_entropy_C is None:
        grad_CV = logits_CV.exp_()
        if grad_logprobs_C is None:
            return grad_CV.zero_()
        grad_CV *= -grad_logprobs_C[:, None]
    else:
        scale_CV = (logits_CV + entropy_C[:, None]).mul_(-grad_entropy_C[:, None])
        if grad_logprobs_C is not None:
            scale_CV -= grad_logprobs_C[:, None]
        grad_CV = logits_CV.exp_().mul_(scale_CV)
    if grad_logprobs_C is not None:
        grad_CV.scatter_add_(1, chosen_C1, grad_logprobs_C[:, None])
    return grad_CV


@contextmanager
def _tensor_cores(hidden_dtype: torch.dtype) -> Iterator[None]:
    """Lets a GPU multiply in TF32 where that cuts no factor short: three times faster.

    TF32 keeps 10 bits of the factors and sums in float32. States and weights of a bfloat16 model have 7, so only the
    order of the sum differs from float32; the gradient of the logits is rounded to 10 bits, on its way to a bfloat16
    gradient. A float32 model stays with float32.
    """
    before = torch.backends.cuda.matmul.fp32_precision
    if hidden_dtype in (torch.bfloat16, torch.float16):
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def _tempered(values_CV: Tensor, temperature: float) -> Tensor:
    """Divides in place; at temperature 1 saves the pass over memory."""
    return values_CV if temperature == 1 else values_CV.div_(temperature)


def _chunks(total: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, total, size))
