"""Log-probability and entropy of drawn and of most likely tokens, without ever holding logits of all of them.

Logits exist for one chunk of rows at a time and are computed again in the backward pass. A hand-written backward rather
than checkpointing: it needs one chunk of logits instead of three, and one gradient of the head instead of two.
Owns: the head's arithmetic in training. Refuses: which tokens are scored by which hidden state (forward.py), and the
softmax, which the sampler shares (models/softmax.py): from equal logits both get equal log-probabilities, to the bit.
Shapes: _A drawn tokens, _C those of one chunk, _D width, _V vocabulary, _K top tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from temper.errors import UserError
from temper.models.softmax import Softmax
from temper.models.states import Head

CHUNK_BYTES = {"cpu": (32 << 20, 32 << 20), "cuda": (256 << 20, 1 << 30)}
"""Least and most logits held at once, two to three times over. On a GPU every chunk reads and writes the gradient of
the head, so a chunk grows with the microbatch, whose activations then take far more."""
CHUNKS = 16
"""Of a microbatch, where its logits are neither few nor many."""


@dataclass(frozen=True, slots=True)
class KeepSets:
    """Which tokens could be drawn in the place of each of A tokens."""

    ids: Tensor
    """Those of the first token, then those of the second, and so on; on the device of the hidden states."""
    starts: list[int]
    """A + 1 places in ids where those of each token begin, and the end. On the host: a chunk is cut without waiting."""

    @staticmethod
    def of(ids: Tensor, counts_A: Tensor, device: torch.device) -> KeepSets:
        return KeepSets(ids.to(device), [0, *counts_A.cumsum(0).tolist()])

    def dropped(self, rows: slice, vocabulary: int) -> Tensor:
        """[C, V]: True for tokens that could not be drawn."""
        starts = torch.tensor(self.starts[rows.start : rows.stop + 1])
        num_rows, ids = len(starts) - 1, self.ids[starts[0] : starts[-1]]
        rows_of_ids = torch.arange(num_rows).repeat_interleave(starts.diff()).to(ids.device)
        dropped_CV = torch.ones(num_rows, vocabulary, dtype=torch.bool, device=ids.device)
        dropped_CV[rows_of_ids, ids] = False
        return dropped_CV


def drawn_logprobs(
    head: Head,
    hidden_AD: Tensor,
    token_ids_A: Tensor,
    *,
    temperature: float,
    chunk_bytes: int | None = None,
    top_ids_AK: Tensor | None = None,
    keep: KeepSets | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """log softmax(head(hidden) / temperature)[token], the entropy of the same distribution, and its [top ids].

    With keep-sets the first is of the softmax over these alone, as the sampler drew. Entropy and top ids stay over the
    whole vocabulary, and the last of the four is the token's log-probability there: None without keep-sets, where it is
    the first.
    All carry a gradient; those of all but the first cost nothing until something differentiates them.
    Ids of one row of top_ids_AK are distinct, or a GPU adds up their gradients in any order.
    """
    settings = (head.softcap, head.is_exact, temperature, _chunk_rows(head, hidden_AD, chunk_bytes))
    return _DrawnLogprobs.apply(  # type: ignore[no-untyped-call, no-any-return]
        hidden_AD, head.weight, head.bias, token_ids_A, top_ids_AK, keep, settings
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
    logprobs_AK = torch.empty(len(hidden_AD), k, dtype=_logits_dtype(head.weight), device=head.weight.device)
    for rows in _chunks(len(hidden_AD), _chunk_rows(head, hidden_AD, chunk_bytes)):
        # Softmax as in drawn_logprobs: the ratio to an unchanged policy is then exactly one.
        logits_CV = _logits(head, hidden_AD[rows], temperature)
        top_CK, ids_AK[rows] = logits_CV.topk(k, sorted=True)
        logprobs_AK[rows] = Softmax.of(logits_CV).logprobs(top_CK)
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
        keep: KeepSets | None,
        settings: Any,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.settings, ctx.keep = settings, keep
        softcap, is_exact, temperature, chunk_rows = settings
        head = Head(weight, bias, softcap, is_exact)
        logprobs_A = torch.empty(len(token_ids_A), dtype=_logits_dtype(weight), device=weight.device)
        entropy_A = torch.empty_like(logprobs_A)
        top_AK = None if top_ids_AK is None else logprobs_A.new_empty(top_ids_AK.shape)
        whole_A = None if keep is None else torch.empty_like(logprobs_A)
        for rows in _chunks(len(token_ids_A), chunk_rows):
            raw_CV, ids_C = _raw_logits(head, hidden_AD[rows]), token_ids_A[rows]
            drawn_C = _as_drawn(raw_CV, ids_C, temperature) if keep is None else None
            if drawn_C is not None and top_AK is None:
                logprobs_A[rows] = drawn_C
                entropy_A[rows] = _fused_entropy(raw_CV, ids_C, drawn_C, temperature)
                continue
            logits_CV = _tempered(raw_CV, temperature)
            softmax, logits_C1 = Softmax.of(logits_CV), logits_CV.gather(1, ids_C[:, None])
            if whole_A is not None and keep is not None:
                whole_A[rows] = softmax.logprobs(logits_C1)[:, 0]
                drawn_C = Softmax.of(logits_CV, keep.dropped(rows, len(weight))).logprobs(logits_C1)[:, 0]
            logprobs_A[rows] = softmax.logprobs(logits_C1)[:, 0] if drawn_C is None else drawn_C
            entropy_A[rows] = softmax.entropy(logits_CV)
            if top_AK is not None and top_ids_AK is not None:
                top_AK[rows] = softmax.logprobs(logits_CV.gather(1, top_ids_AK[rows]))
        ctx.save_for_backward(hidden_AD, weight, bias, token_ids_A, top_ids_AK, logprobs_A, entropy_A, top_AK, whole_A)
        return logprobs_A, entropy_A, top_AK, whole_A

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_AD, weight, bias, token_ids_A, top_ids_AK, logprobs_A, entropy_A, top_AK, whole_A = ctx.saved_tensors
        grad_logprobs_A, grad_entropy_A, grad_top_AK, grad_whole_A = grads
        softcap, _, temperature, chunk_rows = ctx.settings
        head = Head(weight, bias, softcap)  # the slope need not be exact
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden_AD) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=_logits_dtype(weight)) if wants_weight else None
        grad_bias = torch.zeros_like(bias) if wants_bias else None
        for rows in _chunks(len(token_ids_A), chunk_rows):
            raw_CV = _raw_logits(head, hidden_AD[rows])
            drawn = _Chosen.of(rows, token_ids_A[:, None], logprobs_A[:, None], grad_logprobs_A)
            entropy = (entropy_A[rows], None if grad_entropy_A is None else grad_entropy_A[rows])
            if _is_fused(raw_CV) and ctx.keep is None and grad_top_AK is None and softcap is bias is None:
                grad_CV = _fused_gradient(raw_CV, drawn, entropy, temperature, weight.dtype)
            else:
                logits_CV = _tempered(raw_CV, temperature)
                # What the softcap let through of a change in the raw logit; taken before logits are overwritten.
                slope_CV = None if softcap is None else 1 - (logits_CV * (temperature / softcap)).square_()
                top = None if grad_top_AK is None else _Chosen.of(rows, top_ids_AK, top_AK, grad_top_AK)
                if ctx.keep is None:
                    grad_CV = _grad_logits(drawn.normalized(logits_CV), _with_gradient(drawn, top), *entropy)
                else:
                    whole = _Chosen.of(rows, token_ids_A[:, None], whole_A[:, None], grad_whole_A)
                    others = _with_gradient(whole, top)
                    whole_CV = logits_CV.clone() if others or grad_entropy_A is not None else None
                    grad_CV = _grad_kept(logits_CV, drawn, ctx.keep.dropped(rows, len(weight)))
                    if whole_CV is not None:
                        grad_CV += _grad_logits(whole.normalized(whole_CV), others, *entropy)
                grad_CV = _tempered(grad_CV, temperature)
                if slope_CV is not None:
                    grad_CV *= slope_CV
                if grad_bias is not None:
                    grad_bias += grad_CV.sum(0)
                # On a GPU with bfloat16 weights the gradient is rounded to theirs; every sum stays float32.
                grad_CV = grad_CV.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = (grad_CV @ weight).to(hidden_AD.dtype)
            if grad_weight is not None:
                add_product(grad_weight, grad_CV.t(), hidden_AD[rows].to(weight.dtype))
        return (
            grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), grad_bias,
            None, None, None, None,
        )  # fmt: skip


class _Chosen(NamedTuple):
    """Tokens of one chunk whose log-probabilities the loss may depend on."""

    ids_CK: Tensor
    logprobs_CK: Tensor
    grad_CK: Tensor | None

    @staticmethod
    def of(rows: slice, ids_AK: Tensor, logprobs_AK: Tensor, grad_A: Tensor | None) -> _Chosen:
        grad_CK = None if grad_A is None else grad_A[rows].view_as(ids_AK[rows])
        return _Chosen(ids_AK[rows], logprobs_AK[rows], grad_CK)

    def normalized(self, logits_CV: Tensor) -> Tensor:
        """All log-probabilities, in the place of the logits.

        The normaliser follows from what the forward pass kept; no second reduction over the vocabulary.
        """
        logits_CV -= logits_CV.gather(1, self.ids_CK[:, :1]) - self.logprobs_CK[:, :1]
        return logits_CV


def _with_gradient(*chosen: _Chosen | None) -> list[tuple[Tensor, Tensor]]:
    return [(one.ids_CK, one.grad_CK) for one in chosen if one is not None and one.grad_CK is not None]


def _grad_kept(logits_CV: Tensor, drawn: _Chosen, dropped_CV: Tensor) -> Tensor:
    """Gradient of the logits by the drawn tokens' log-probabilities within their keep-sets, in the logits' place."""
    unused_C = drawn.logprobs_CK[:, 0]
    grad_CV = _grad_logits(drawn.normalized(logits_CV), _with_gradient(drawn), unused_C, None)
    # A policy that has moved may think anything of a token that was left out, even that it is infinitely likelier.
    return grad_CV.masked_fill_(dropped_CV, 0.0)


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
    return _tempered(_raw_logits(head, hidden_CD), temperature)


def _raw_logits(head: Head, hidden_CD: Tensor) -> Tensor:
    return head.logits(hidden_CD)


def _as_drawn(logits_CV: Tensor, ids_C: Tensor, temperature: float) -> Tensor | None:
    """Log-probabilities by the kernel that draws tokens on a GPU. None: no such kernel here, take Softmax."""
    if not _is_fused(logits_CV):
        return None
    from temper.models.kernels.draw import token_logprobs

    return token_logprobs(logits_CV, ids_C, temperature)


def _is_fused(logits_CV: Tensor) -> bool:
    """Whether kernels read these logits once where torch would take five readings."""
    return logits_CV.is_cuda and logits_CV.dtype == torch.float32


def _fused_entropy(logits_CV: Tensor, ids_C: Tensor, logprobs_C: Tensor, temperature: float) -> Tensor:
    from temper.models.kernels.head import entropies

    return entropies(logits_CV, _normalizer(logits_CV, ids_C, logprobs_C, temperature), temperature)


def _fused_gradient(
    logits_CV: Tensor, drawn: _Chosen, entropy: tuple[Tensor, Tensor | None], temperature: float, dtype: torch.dtype
) -> Tensor:
    from temper.models.kernels.head import logits_gradient

    ids_C, grad_CK = drawn.ids_CK[:, 0], drawn.grad_CK
    normalizer_C = _normalizer(logits_CV, ids_C, drawn.logprobs_CK[:, 0], temperature)
    grad_C = None if grad_CK is None else grad_CK[:, 0]
    return logits_gradient(logits_CV, ids_C, normalizer_C, grad_C, entropy, temperature, dtype)


def _normalizer(logits_CV: Tensor, ids_C: Tensor, logprobs_C: Tensor, temperature: float) -> Tensor:
    """The normalizer in log p = logit / temperature - normalizer, from one token's logit and log-probability."""
    return logits_CV.gather(1, ids_C[:, None])[:, 0] / temperature - logprobs_C


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, summed in the dtype of the total."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:  # without a product in float32 beside it, which would be written and read once more
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += torch.mm(left, right, out_dtype=total.dtype)


def chunk_bytes_of(logits_bytes: int, device_type: str) -> int:
    """How much of so many logits is held at once."""
    least, most = CHUNK_BYTES.get(device_type, CHUNK_BYTES["cpu"])
    return min(max(logits_bytes // CHUNKS, least), most)


def _chunk_rows(head: Head, hidden_AD: Tensor, chunk_bytes: int | None) -> int:
    """Rows whose logits fit into chunk_bytes; None: the default of the device."""
    row_bytes = head.weight.shape[0] * _logits_dtype(head.weight).itemsize
    if chunk_bytes is None:
        chunk_bytes = chunk_bytes_of(len(hidden_AD) * row_bytes, hidden_AD.device.type)
    return max(1, chunk_bytes // row_bytes)


def _logits_dtype(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)


def _tempered(values_CV: Tensor, temperature: float) -> Tensor:
    """Divides in place; at temperature 1 saves the pass over memory.

    By a tensor, as the sampler, which has one number per row: by a plain number a GPU multiplies with the inverse.
    """
    return values_CV if temperature == 1 else values_CV.div_(values_CV.new_full((), temperature))


def _chunks(total: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, total, size))
