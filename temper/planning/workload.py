"""What one stage computes and holds, in plain numbers: what every sum of this package is about.

Owns: the record, and what follows from it by counting. Refuses: recipes and data (build/memory.py reads them).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from temper.config.memory import MemoryChoice
from temper.planning.shape import DecoderShape

LEAST_SHARED = 1 / 16
"""Share of packed tokens below which a common prompt is computed for every row (trainer/passes/sharing.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShape:
    """Of low rank, in place of training the weights."""

    rank: int
    targets: tuple[str, ...] = ()
    """Names of linear layers; empty: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    shape: DecoderShape
    choice: MemoryChoice
    """kv_tokens is a number of tokens here, never 0."""
    itemsize: int = 2
    """Bytes of a weight."""
    adapter: AdapterShape | None = None
    """None: all weights are trained."""
    has_four_bit_base: bool = False
    """Whether the matrices below the adapter are held in 4 bits, for trainer and sampler."""
    has_float8_sampler: bool = False
    """Whether the sampler has the matrices of layers in float8, beside the trainer's."""
    offload: bool = False
    """Whether moments and masters live in the memory of the host."""
    frozen: tuple[DecoderShape, ...] = ()
    """References and teachers with weights of their own."""
    offload_frozen: bool = False
    has_critic: bool = False
    has_own_head: bool = False
    """Whether a scalar head takes the place of logits."""
    trains: bool = True
    engine: Literal["shared", "copied", "elsewhere"] = "shared"
    """Whose weights the sampler draws with: the trainer's, a copy on the same GPU, or none here."""
    num_samplers: int = 1
    """Engines on this GPU, each with a copy of the weights and a cache."""
    samples: bool = True
    """Whether there is a sampler with a cache."""
    rolls: bool = True
    """Whether it trains on what it draws, in place of drawing for evaluations alone."""
    prompt_tokens: int
    """Of a usual prompt."""
    completion_tokens: int
    """Of the longest completion; of given rows, what is trained of the longest."""
    group_size: int
    """Rows that share a prompt."""
    rows_per_update: int
    updates: int = 1
    """Optimiser steps of one pass over a batch."""
    epochs: int = 1
    """Passes over a batch."""
    max_running: int
    tokens_per_step: int = 4096
    """Of the engine."""
    has_graphs: bool = True

    @property
    def row_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def packed_tokens(self) -> int:
        """Of the largest microbatch: a row is never cut, and there are no more rows than an update has."""
        most = min(self.choice.tokens_per_microbatch, self.rows_per_update * self.row_tokens)
        return max(self.row_tokens, most)

    @property
    def num_rows(self) -> int:
        """Of that microbatch."""
        return max(1, self.packed_tokens // self.row_tokens)

    @property
    def computed_tokens(self) -> int:
        """Those of the packed tokens that pass through the layers: a common prompt does so once."""
        return round(self.packed_tokens * (1 - self.shared_part(self.num_rows)))

    @property
    def scored_tokens(self) -> int:
        return round(self.packed_tokens * self.completion_tokens / self.row_tokens)

    def shared_part(self, num_rows: int) -> float:
        """Share of the tokens of so many rows that is not computed because a row of the group has them already."""
        alike = min(self.group_size, num_rows)
        saved = (1 - 1 / alike) * self.prompt_tokens / self.row_tokens
        return saved if saved >= LEAST_SHARED else 0.0

    @property
    def trained_parameters(self) -> int:
        if not self.trains:
            return 0
        if self.adapter is None:
            return self.shape.parameters
        return self.shape.adapter_parameters(self.adapter.rank, self.adapter.targets)
