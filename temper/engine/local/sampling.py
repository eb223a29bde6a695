"""Drawing tokens: counter-based uniforms and inverse-CDF sampling with float32 log-probabilities.

Owns: the distribution a token is drawn from and the log-probability that is reported for it.
Shapes: _R rows, _V vocabulary, _K most likely tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def uniforms(keys_R: NDArray[np.uint64], positions_R: NDArray[np.int64]) -> NDArray[np.float32]:
    """One number in [0, 1) per (key, position), with 24 random bits: splitmix64 of the key advanced by the position."""
    x = keys_R + (positions_R.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    x = x ^ (x >> np.uint64(31))
    # 24 bits are all a float32 below 1 can hold; more would round up to 1.0 and draw past the end.
    return ((x >> np.uint64(40)).astype(np.float64) * 2.0**-24).astype(np.float32)


def tempered_logprobs(logits_RV: Tensor, temperature_R: Tensor) -> Tensor:
    """Log-probabilities after temperature; at temperature 0, which is greedy, those of temperature 1."""
    divisor_R = torch.where(temperature_R == 0, torch.ones_like(temperature_R), temperature_R)
    return torch.log_softmax(logits_RV / divisor_R.unsqueeze(1), dim=-1)


def sample(logprobs_RV: Tensor, temperature_R: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """Token and its log-probability per row. Temperature 0 takes the most likely one."""
    is_greedy_R = temperature_R == 0
    cumulative_RV = logprobs_RV.exp().cumsum(-1)
    target_R = (uniform_R * cumulative_RV[:, -1]).unsqueeze(1)
    # right=True: the first entry strictly above the target, which therefore has probability greater than zero.
    drawn_R = torch.searchsorted(cumulative_RV, target_R, right=True).squeeze(1)
    best_R = logprobs_RV.argmax(-1)
    is_past_end_R = drawn_R >= logprobs_RV.shape[1]
    tokens_R = torch.where(is_greedy_R | is_past_end_R, best_R, drawn_R)
    return tokens_R, logprobs_RV.gather(1, tokens_R.unsqueeze(1)).squeeze(1)


def most_likely(logprobs_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` most likely tokens per row and their float32 log-probabilities; of equal ones the lower id first."""
    rounded_RV = logprobs_RV.float() + 0.0  # one zero: -0.0 is another number to what follows
    bits_RV = rounded_RV.view(torch.int32)
    # As integers the bits of floats are in order, once those of negative numbers are turned round. The id goes below
    # them: topk itself breaks ties as it likes.
    ordered_RV = torch.where(bits_RV < 0, bits_RV ^ 0x7FFFFFFF, bits_RV).long()
    ids_V = torch.arange(logprobs_RV.shape[1], device=logprobs_RV.device)
    ids_RK = (ordered_RV * 2**32 - ids_V).topk(count, sorted=True).indices
    return ids_RK, rounded_RV.gather(1, ids_RK)
