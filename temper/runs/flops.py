"""FLOPs that a model had to compute, and what share of the hardware's peak that is (MFU).

Owns: the count. What an implementation computes beyond need (recomputed activations, a prompt again for every row that
begins with it, padding) is not counted: it is not progress. Refuses: clocks, and finding out what was computed
(trainer/passes/work.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PEAK_FLOPS: dict[str, dict[str, float]] = {
    "B200": {"bfloat16": 2250e12, "float16": 2250e12, "float8": 4500e12},
    "GH200": {"bfloat16": 989e12, "float16": 989e12, "float8": 1979e12, "float32": 67e12},
    "H200": {"bfloat16": 989e12, "float16": 989e12, "float8": 1979e12, "float32": 67e12},
    "H100": {"bfloat16": 989e12, "float16": 989e12, "float8": 1979e12, "float32": 67e12},
    "H100 NVL": {"bfloat16": 835e12, "float16": 835e12, "float8": 1671e12, "float32": 60e12},
    "H100 PCIE": {"bfloat16": 756e12, "float16": 756e12, "float8": 1513e12, "float32": 51e12},
    "A100": {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12},
    "L40S": {"bfloat16": 362e12, "float16": 362e12, "float8": 733e12, "float32": 91.6e12},
    "L4": {"bfloat16": 121e12, "float16": 121e12, "float8": 242e12, "float32": 30.3e12},
    "A10": {"bfloat16": 125e12, "float16": 125e12, "float32": 31.2e12},
    "RTX 4090": {"bfloat16": 165e12, "float16": 165e12, "float8": 330e12, "float32": 82.6e12},
    "RTX 3090": {"bfloat16": 71e12, "float16": 71e12, "float32": 35.6e12},
    "T4": {"float16": 65e12, "float32": 8.1e12},
}
"""By words of the name that torch gives a GPU, then dtype: dense FLOP/s of its data sheet, float32 accumulation."""
LESSER = {"D", "MIG", "LAPTOP", "MOBILE", "MAX", "TI"}
"""Words that make a GPU another one than its number says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassWork:
    """What one pass over packed rows had to compute."""

    positions: NDArray[np.integer[Any]]
    """Place in its row of every token that is computed. A prompt that rows share is there once."""
    num_scored: int
    """Tokens that the head reads."""
    has_backward: bool
    """Whether a gradient was taken; rows without credit have a forward pass alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What the FLOPs of a token depend on. Embeddings are looked up and cost nothing."""

    trained: float
    """Parameters of matrices inside the layers that get a gradient; of experts those that work on one token."""
    frozen: float
    """Those that get none: under an adapter nearly all."""
    head: float
    """Parameters of the matrix that makes logits."""
    is_head_trained: bool
    attention_width: int
    """Heads times their size."""
    windows: tuple[int | None, ...]
    """By layer, how many tokens a token sees, itself included; None: all before it."""

    def flops(self, work: PassWork) -> float:
        """Two for a multiplication and addition. Backward: once more for the states, and once for what is trained."""
        tokens, pairs = len(work.positions), self._pairs(work.positions)
        layers = 2.0 * (self.trained + self.frozen) * tokens
        head = 2.0 * self.head * work.num_scored
        attention = 4.0 * self.attention_width * pairs  # scores, and the sum of values
        if not work.has_backward:
            return layers + head + attention
        slopes = 2.0 * self.trained * tokens + (head if self.is_head_trained else 0.0)
        return 2 * layers + 2 * head + slopes + 3 * attention

    def _pairs(self, positions: NDArray[np.integer[Any]]) -> float:
        """Pairs of a token and one that it sees, over all layers."""
        seen = positions.astype(np.int64) + 1
        return float(
            sum(
                count * int(seen.sum() if window is None else np.minimum(seen, window).sum())
                for window, count in Counter(self.windows).items()
            )
        )


def active_parameters(sizes: Mapping[str, int], *, num_experts: int = 0, experts_per_token: float = 0) -> float:
    """Parameters that work on one token: all by name, of experts only as many as are chosen."""
    share = experts_per_token / num_experts if num_experts else 1.0
    return sum(size * (share if ".experts." in f".{name}." else 1.0) for name, size in sizes.items())


def is_called(device_name: str, name: str) -> bool:
    """Whether the name that torch gives a GPU has all words of this one, and none that makes it a lesser GPU."""
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    return words >= set(name.split()) and not words & LESSER


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Peak FLOP/s of a GPU by the name torch gives it and the dtype of the weights; None when it is not known."""
    known = [name for name in PEAK_FLOPS if is_called(device_name, name)]
    return PEAK_FLOPS[max(known, key=len)].get(dtype.removeprefix("torch.")) if known else None


def mfu(flops: float, seconds: float, peak: float | None) -> dict[str, float]:
    """sys/mfu of the training phases of a step; nothing, and not 0, where the peak is not known."""
    return {} if peak is None or seconds <= 0 else {"sys/mfu": flops / (seconds * peak)}
