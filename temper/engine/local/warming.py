"""Which recordings a run will need, known before its first request: made then, no step waits for them.

Owns: the sizes that matter. Refuses: recording (graphs.py, chunks.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from temper.engine.local.chunks import ChunkGraphs, Size
from temper.engine.local.graphs import SHORT, DecodeGraphs, GraphKey, bucket, rounded_length
from temper.engine.local.sampling import Draws
from temper.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedRequests:
    """What a run will ask of its engine."""

    num_rows: int
    """Sequences that run together at most."""
    num_prompts: int
    """Different prompts that start together at most."""
    prompt_tokens: int
    """Of a usual prompt."""
    longest: int
    """Of a sequence, its completion included."""
    params: SamplingParams

    @property
    def first_draw(self) -> Draws:
        """How one of them draws its first token."""
        asked, one = self.params, np.ones(1, dtype=np.int64)
        return Draws(
            temperature_R=np.full(1, asked.temperature, dtype=np.float32),
            random_key_R=one.astype(np.uint64),
            position_R=one,
            top_k_R=one * asked.top_k,
            top_p_R=one * asked.top_p,
            min_p_R=one * asked.min_p,
            num_top=asked.top_logprobs,
            entropy=asked.entropy,
        )


def decode_keys(graphs: DecodeGraphs, expected: ExpectedRequests) -> list[GraphKey]:
    """Graphs that a rollout passes through: fewer rows as sequences finish, longer ones as they grow. Also short ones:
    a canary has short prompts, whatever training has. Largest first: later ones find room in what it leaves."""
    sizes = sorted({bucket(count) for count in range(1, expected.num_rows + 1)}, reverse=True)
    lengths = list(_powers(SHORT, rounded_length(expected.longest)))
    draws = expected.first_draw.is_plain
    return list(dict.fromkeys(graphs.key_of(size, length, draws=draws) for size in sizes for length in lengths))


def chunk_sizes(graphs: ChunkGraphs, expected: ExpectedRequests, tokens_per_step: int) -> list[Size]:
    """Passes over 1, 2, 4 ... usual prompts, up to all that start together and fit into a step. Largest first."""
    found: list[Size] = []
    for count in _powers(1, expected.num_prompts):
        tokens = min(count * expected.prompt_tokens, tokens_per_step)
        rows, longest = -(-tokens // expected.prompt_tokens), min(expected.prompt_tokens, tokens)
        if (size := graphs.size_of(tokens, rows, longest)) is not None:
            found.append(size)
    return sorted(set(found), reverse=True)


def _powers(first: int, last: int) -> Iterator[int]:
    """first, twice that, and so on up to last, which is there as well."""
    while first < last:
        yield first
        first *= 2
    yield last
