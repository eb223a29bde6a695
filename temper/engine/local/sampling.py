"""Drawing tokens: counter-based uniforms and inverse-CDF sampling with float32 log-probabilities.

Owns: the distribution a token is drawn from and the log-probability that is reported for it.
Shapes: _R rows, _V vocabulary.
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


def sample(logits_RV: Tensor, temperature_R: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """Token and its log-probability per row. Temperature 0 is greedy, reported at temperature 1."""
    is_greedy_R = temperature_R == 0
    divisor_R = torch.where(is_greedy_R, torch.ones_like(temperature_R), temperature_R)
    logprobs_RV = torch.log_softmax(logits_RV / divisor_R.unsqueeze(1), dim=-1)
    cumulative_RV = logprobs_RV.exp().cumsum(-1)
    target_R = (uniform_R * cumulative_RV[:, -1]).unsqueeze(1)
    # right=True: the first entry strictly above the target, which therefore has probability greater than zero.
    drawn_R = torch.searchsorted(cumulative_RV, target_R, right=True).squeeze(1)
    best_R = logprobs_RV.argmax(-1)
    is_past_end_R = drawn_R >= logits_RV.shape[1]
    tokens_R = torch.where(is_greedy_R | is_past_end_R, best_R, drawn_R)
    return tokens_R, logprobs_RV.gather(1, tokens_R.unsqueeze(1)).squeeze(1)
