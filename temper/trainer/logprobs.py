"""Log-probability and entropy of drawn and of most likely tokens, without ever holding logits of all of them.

Logits exist for one chunk of rows at a time and are computed again in the backward pass. A hand-written backward rather
than checkpointing: it needs one chunk of logits instead of three, and one gradient of the head instead of two.
Owns: the head's arithmetic in training. Refuses: which tokens are scored by which hidden state (forward.py).
Shapes: _A drawn tokens, _C those of one chunk, _D width, _V vocabulary, _K top tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from temper.errors import UserError
from temper.models.load import Head

CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
"""Logits held at once, two to three times over. A GPU would gain a tenth more from four times as much."""


def drawn_logprobs(
    head: Head,
    hidden_AD: Tensor,
    token_ids_A: Tensor,
    *,
    temperature: float,
    chunk_bytes: int | None = None,
    top_ids_AK: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """log softmax(head(hidden) / temperature)[token], the entropy of the same distribution, and its [top ids].

    All carry a gradient; those of entropy and top cost nothing until something differentiates them.
    Ids of one row of top_ids_AK are distinct, or a GPU adds up their gradients in any order.
    """
    settings = (head.softcap, temperature, _chunk_rows(head, hidden_AD, chunk_bytes))
    return _DrawnLogprobs.apply(  # type: ignore[no-untyped-call, no-any-return]
        hidden_AD, head.weight, head.bias, token_ids_A, top_ids_AK, settings
    )


@torch.no_grad()
def top_tokens(
    head: Head, hidden_AD: Tensor, k: int, *, temperature: float, chunk_bytes: int | None = None
) -> tuple[Tensor, Tensor]:
    """The k most likely tokens and their log-probabilities, most likely first, without gradient."""
    vocabulary = head.weight.shape[0]
    if not 0 < k <= vocabulary:
        raise UserError(f"{k} most likely tokens were asked for; the vocabulary has {vocabulary}. Ask for 1 or more.")
    ids_AK = torch.empty(len(hidden_AD), k, dtype=torch.int64, device=head.weight.device)
    logprobs_AK = torch.empty(len(hidden_AD), k, dtype=head.weight.dtype, device=head.weight.device)
    for rows in _chunks(len(hidden_AD), _chunk_rows(head, hidden_AD, chunk_bytes)):
        # log_softmax as in drawn_logprobs: the ratio to an unchanged policy is then exactly one.
        logprobs_CV = torch.log_softmax(_logits(head, hidden_AD[rows], temperature), dim=-1)
        logprobs_AK[rows], ids_AK[rows] = logprobs_CV.topk(k, sorted=True)
    return ids_AK, logprobs_AK


class _DrawnLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_AD: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids_A: Tensor,
        top_ids_AK: Tensor | None,
        settings: Any,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.settings = settings
        softcap, temperature, chunk_rows = settings
        head = Head(weight, bias, softcap)
        logprobs_A = torch.empty(len(token_ids_A), dtype=weight.dtype, device=weight.device)
        entropy_A = torch.empty_like(logprobs_A)
        top_AK = None if top_ids_AK is None else logprobs_A.new_empty(top_ids_AK.shape)
        for rows in _chunks(len(token_ids_A), chunk_rows):
            logits_CV = _logits(head, hidden_AD[rows], temperature)
            logprobs_CV = torch.log_softmax(logits_CV, dim=-1)
            del logits_CV
            logprobs_A[rows] = logprobs_CV.gather(1, token_ids_A[rows, None])[:, 0]
            if top_AK is not None and top_ids_AK is not None:
                top_AK[rows] = logprobs_CV.gather(1, top_ids_AK[rows])
            entropy_A[rows] = -logprobs_CV.exp().mul_(logprobs_CV).sum(-1)
        ctx.save_for_backward(hidden_AD, weight, bias, token_ids_A, top_ids_AK, logprobs_A, entropy_A)
        return logprobs_A, entropy_A, top_AK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_AD, weight, bias, token_ids_A, top_ids_AK, logprobs_A, entropy_A = ctx.saved_tensors
        grad_logprobs_A, grad_entropy_A, grad_top_AK = grads
        softcap, temperature, chunk_rows = ctx.settings
        head = Head(weight, bias, softcap)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden_AD) if wants_hidden else None
        grad_weight = torch.zeros_like(weight) if wants_weight else None
        grad_bias = torch.zeros_like(bias) if wants_bias else None
        for rows in _chunks(len(token_ids_A), chunk_rows):
            logits_CV = _logits(head, hidden_AD[rows], temperature)
            # What the softcap let through of a change in the raw logit; taken before the logits are overwritten.
            slope_CV = None if softcap is None else 1 - (logits_CV * (temperature / softcap)).square_()
            # The normaliser follows from what the forward pass kept; no second reduction over the vocabulary.
            logits_CV -= logits_CV.gather(1, token_ids_A[rows, None]) - logprobs_A[rows, None]
            chosen = []
            if grad_logprobs_A is not None:
                chosen.append((token_ids_A[rows, None], grad_logprobs_A[rows, None]))
            if grad_top_AK is not None:
                chosen.append((top_ids_AK[rows], grad_top_AK[rows]))
            grad_entropy_C = None if grad_entropy_A is None else grad_entropy_A[rows]
            grad_CV = _tempered(_grad_logits(logits_CV, chosen, entropy_A[rows], grad_entropy_C), temperature)
            if slope_CV is not None:
                grad_CV *= slope_CV
            with _tensor_cores(hidden_AD.dtype):
                if grad_hidden is not None:
                    grad_hidden[rows] = (grad_CV @ weight).to(hidden_AD.dtype)
                if grad_weight is not None:
                    grad_weight.addmm_(grad_CV.t(), hidden_AD[rows].to(weight.dtype))
            if grad_bias is not None:
                grad_bias += grad_CV.sum(0)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _grad_logits(
    logprobs_CV: Tensor, chosen: list[tuple[Tensor, Tensor]], entropy_C: Tensor, grad_entropy_C: Tensor | None
) -> Tensor:
    """d/dz of sum_k g_k log p[v_k] + h H: sum_k g_k (onehot_k - p) - h p (log p + H), over all (v, g) [C, K] chosen.

    Overwrites the log-probabilities.
    """
    total_C1 = sum(grad_CK.sum(-1, keepdim=True) for _, grad_CK in chosen)
    if grad_entropy_C is None:
        grad_CV = logprobs_CV.exp_().mul_(-total_C1)
    else:
        scale_CV = (logprobs_CV + entropy_C[:, None]).mul_(-grad_entropy_C[:, None])
        scale_CV -= total_C1
        grad_CV = logprobs_CV.exp_().mul_(scale_CV)
    # One after the other: a drawn token is often a top token too, and within one call a GPU adds in any order.
    for ids_CK, grad_CK in chosen:
        grad_CV.scatter_add_(1, ids_CK, grad_CK)
    return grad_CV


def _logits(head: Head, hidden_CD: Tensor, temperature: float) -> Tensor:
    with _tensor_cores(hidden_CD.dtype):
        return _tempered(head.logits(hidden_CD), temperature)


def _chunk_rows(head: Head, hidden_AD: Tensor, chunk_bytes: int | None) -> int:
    """Rows whose logits fit into chunk_bytes; None: the default of the device."""
    if chunk_bytes is None:
        chunk_bytes = CHUNK_BYTES.get(hidden_AD.device.type, CHUNK_BYTES["cpu"])
    return max(1, chunk_bytes // (head.weight.shape[0] * head.weight.element_size()))


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
