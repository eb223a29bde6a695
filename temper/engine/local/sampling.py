"""Drawing tokens: counter-based uniforms, keep-sets, and inverse-CDF sampling with float32 log-probabilities.

Owns: the distribution a token is drawn from, and that it is reported truly. No host synchronisation on a GPU.
Refuses: the softmax itself, which the trainer shares (models/softmax.py).
Shapes: _R rows, _V vocabulary, _K most likely tokens, _B blocks of the vocabulary, _N some rows or columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from temper.models.softmax import BLOCK, Softmax

SMALL_KEEP_SET = 64
"""Tokens that are put in order at first where putting all in order is slow."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """How one token of each row is to be drawn; arrays are parallel."""

    temperature_R: NDArray[np.float32]
    random_key_R: NDArray[np.uint64]
    position_R: NDArray[np.int64]
    """Position of the token to be drawn: the length of the row so far."""
    top_k_R: NDArray[np.int64]
    top_p_R: NDArray[np.floating[Any]]
    min_p_R: NDArray[np.floating[Any]]
    num_top: int = 0
    """Most likely tokens that the most curious row wants."""
    entropy: bool = False
    """Whether any row wants the entropy."""

    @property
    def is_plain(self) -> bool:
        """Tokens and their log-probabilities are all that is asked: a GPU can then draw several in a row by itself."""
        return not (self.num_top or self.entropy or self.is_truncated)

    @property
    def is_truncated(self) -> bool:
        return bool(self.is_truncated_R.any())

    @property
    def is_truncated_R(self) -> NDArray[np.bool_]:
        return (self.top_k_R > 0) | (self.top_p_R < 1) | (self.min_p_R > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What was drawn, on the device: S tokens in a row for each row; everything but tokens and logprobs needs S = 1."""

    tokens_RS: Tensor
    logprobs_RS: Tensor
    top_ids_RK: Tensor | None = None
    """The most likely tokens first. None: no row asked for any."""
    top_logprobs_RK: Tensor | None = None
    entropy_R: Tensor | None = None
    kept_RV: Tensor | None = None
    """True for every token that could be drawn, in rows that were truncated. None: no row was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A Table on the host."""

    tokens_RS: NDArray[np.int64]
    logprobs_RS: NDArray[np.float32]
    top_ids_RK: NDArray[np.int32] | None = None
    top_logprobs_RK: NDArray[np.float32] | None = None
    entropy_R: NDArray[np.float32] | None = None
    keep_ids: list[NDArray[np.int32]] | None = None


def draw(logits_RV: Tensor, draws: Draws) -> Table:
    """One token per row, by these rules, in this order; a row's result does not depend on the other rows.

    1. Logits are divided by the temperature. Temperature 0 takes the most likely token, of equal ones the lower id;
       for everything else that is reported it counts as temperature 1.
    2. The keep-set is made of the distribution after temperature: the top_k most likely tokens, and the fewest most
       likely ones whose mass reaches top_p, and those at least min_p times as likely as the most likely. All three are
       measured on the whole distribution and all must hold; of equally likely tokens the lower id goes first. The most
       likely token is always kept.
    3. The token is drawn from the keep-set, renormalised. Its log-probability and the entropy are of that distribution.
       The most likely tokens are those before truncation, with log-probabilities over the whole vocabulary.
    """
    device = logits_RV.device
    logits_RV = _tempered(logits_RV, draws.temperature_R)
    whole = Softmax.of(logits_RV)
    kept_RV = _keep_sets(logits_RV, whole, draws) if draws.is_truncated else None
    softmax = whole if kept_RV is None else whole.within(kept_RV)
    tokens_R1 = _inverse_cdf(softmax, _column(uniforms(draws.random_key_R, draws.position_R), device))
    is_greedy_R = draws.temperature_R == 0
    if is_greedy_R.any():
        best_R1 = logits_RV.argmax(-1, keepdim=True)
        tokens_R1 = torch.where(_column(is_greedy_R, device), best_R1, tokens_R1)
    top_ids_RK = top_logprobs_RK = None
    if draws.num_top:
        top_ids_RK, top_logits_RK = most_likely(logits_RV, draws.num_top)
        top_logprobs_RK = whole.logprobs(top_logits_RK)
    return Table(
        tokens_RS=tokens_R1,
        logprobs_RS=softmax.logprobs(logits_RV.gather(1, tokens_R1)),
        top_ids_RK=top_ids_RK,
        top_logprobs_RK=top_logprobs_RK,
        entropy_R=softmax.entropy(logits_RV) if draws.entropy else None,
        kept_RV=None if kept_RV is None else kept_RV & _column(draws.is_truncated_R, device),
    )


def uniforms(keys_R: NDArray[np.uint64], positions_R: NDArray[np.int64]) -> NDArray[np.float32]:
    """One number in [0, 1) per (key, position), with 24 random bits: splitmix64 of the key advanced by the position."""
    x = keys_R + (positions_R.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    x = x ^ (x >> np.uint64(31))
    # 24 bits are all a float32 below 1 can hold; more would round up to 1.0 and draw past the end.
    return ((x >> np.uint64(40)).astype(np.float64) * 2.0**-24).astype(np.float32)


def most_likely(scores_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest scores per row, as (ids, float32 scores), largest first; of equal ones the lower id first."""
    if scores_RV.device.type == "cpu" and count < scores_RV.shape[1]:
        values_RK, ids_RK = scores_RV.float().topk(count + 1, sorted=True)
        if (values_RK[:, :-1] > values_RK[:, 1:]).all():  # no ties, so any order of them is the right one
            return ids_RK[:, :-1], values_RK[:, :-1]
    rounded_RV = scores_RV.float() + 0.0  # one zero: -0.0 is another number to what follows
    bits_RV = rounded_RV.view(torch.int32)
    # As integers the bits of floats are in order, once those of negative numbers are turned round. The id goes below
    # them: topk itself breaks ties as it likes.
    ordered_RV = torch.where(bits_RV < 0, bits_RV ^ 0x7FFFFFFF, bits_RV).long()
    ids_V = torch.arange(scores_RV.shape[1], device=scores_RV.device)
    ids_RK = (ordered_RV * 2**32 - ids_V).topk(count, sorted=True).indices
    return ids_RK, rounded_RV.gather(1, ids_RK)


def _tempered(logits_RV: Tensor, temperature_R: NDArray[np.float32]) -> Tensor:
    """Logits divided by the temperature. Where all temperatures are 1 or greedy, the pass over memory is saved."""
    divisor_R = np.where(temperature_R == 0, np.float32(1), temperature_R)
    if (divisor_R == 1).all():
        return logits_RV
    return logits_RV / _column(divisor_R, logits_RV.device)


def _column(array_R: NDArray[Any], device: torch.device) -> Tensor:
    """[R, 1] on the device, without waiting for it."""
    return torch.from_numpy(array_R).to(device, non_blocking=True).unsqueeze(1)


def _inverse_cdf(softmax: Softmax, uniform_R1: Tensor) -> Tensor:
    """The token [R, 1] at which the cumulative probability, by id, passes the uniform: first the block, then in it."""
    blocks_RB, vocabulary = softmax.blocks_RB.double(), softmax.weights_RV.shape[1]
    target_R1 = uniform_R1.double() * blocks_RB.sum(-1, keepdim=True)
    block_R1, target_R1 = _crossing(blocks_RB, target_R1)
    ids_RN = block_R1 * BLOCK + torch.arange(BLOCK, device=block_R1.device)
    weights_RN = softmax.weights_RV.gather(1, ids_RN.clamp(max=vocabulary - 1)) * (ids_RN < vocabulary)
    token_R1 = block_R1 * BLOCK + _crossing(weights_RN.double(), target_R1)[0]
    return token_R1.clamp(max=vocabulary - 1)  # of logits that are NaN: some token, and a log-probability that tells


def _crossing(weights_RN: Tensor, target_R1: Tensor) -> tuple[Tensor, Tensor]:
    """The first place whose cumulative weight is above the target, and what of the target is left there.

    Never a place of weight 0: not before the target, where the sum does not move, nor at the end, where rounding can
    put the target beyond everything and the last weight above 0 is taken.
    """
    cumulative_RN = weights_RN.cumsum(-1)
    above_R1 = torch.searchsorted(cumulative_RN, target_R1, right=True)
    last_R1 = torch.searchsorted(cumulative_RN, cumulative_RN[:, -1:].contiguous())
    # NaN has no place: the clamp keeps it from reading past the end, and whoever draws sees its log-probability.
    place_R1 = torch.minimum(above_R1, last_R1).clamp(max=weights_RN.shape[1] - 1)
    return place_R1, target_R1 - (cumulative_RN - weights_RN).gather(1, place_R1)


def _keep_sets(logits_RV: Tensor, softmax: Softmax, draws: Draws) -> Tensor:
    """[R, V]: True for tokens that can be drawn; all of a row that is not truncated."""
    device = logits_RV.device
    # The most likely token weighs exactly 1.
    kept_RV = softmax.weights_RV >= _column(draws.min_p_R.astype(np.float32), device)
    # Only rows that need their tokens in order: for all others that would cost more than everything else.
    ranked = np.flatnonzero((draws.top_k_R > 0) | (draws.top_p_R < 1))
    if len(ranked):
        rows_N = _column(ranked, device)[:, 0]
        # Where all are allowed rounding must not cost a token.
        share_N = np.where(draws.top_p_R[ranked] < 1, draws.top_p_R[ranked], np.inf)
        mass_N1 = softmax.total_R1[rows_N] * _column(share_N, device)
        first_NV = _first_tokens(logits_RV[rows_N], softmax.weights_RV[rows_N], draws.top_k_R[ranked], mass_N1)
        kept_RV[rows_N] &= first_NV
    return kept_RV


def _first_tokens(
    logits_NV: Tensor, weights_NV: Tensor, top_k_N: NDArray[np.int64], mass_N1: Tensor, count: int = SMALL_KEEP_SET
) -> Tensor:
    """[N, V]: True for the most likely tokens, as many as top_k allows (0: all) and until their weight reaches mass.

    Putting a whole vocabulary in order is slow on a CPU and most keep-sets are small: there `count` tokens are tried,
    and more for rows that need more. Asking a GPU whether that was enough would be slow in turn.
    """
    device, vocabulary = logits_NV.device, logits_NV.shape[1]
    limit_N = np.where(top_k_N > 0, np.minimum(top_k_N, vocabulary), vocabulary)
    most = int(limit_N.max())
    count = min(count, most) if device.type == "cpu" else most
    ids_NK, _ = most_likely(logits_NV, count)
    weights_NK = weights_NV.gather(1, ids_NK).double()
    before_NK = weights_NK.cumsum(-1) - weights_NK
    is_allowed_NK = torch.arange(count, device=device) < _column(limit_N, device)
    first_NK = is_allowed_NK & (before_NK < mass_N1)
    first_NV = torch.zeros_like(logits_NV, dtype=torch.bool).scatter_(1, ids_NK, first_NK)
    if count < most:
        rest = first_NK[:, -1].nonzero()[:, 0]
        if len(rest):
            first_NV[rest] = _first_tokens(
                logits_NV[rest], weights_NV[rest], top_k_N[rest.numpy()], mass_N1[rest], count * 16
            )
    return first_NV
