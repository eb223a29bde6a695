"""Settings that fit into the memory of a GPU.

Owns: which combination is preferred. Refuses: the sums (memory.py), and changing what a recipe gives (remedy.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from temper.config.memory import MemoryChoice, States
from temper.planning.memory import plan_memory
from temper.planning.workload import Workload, by_gpu

MICROBATCHES = (65536, 32768, 16384, 8192)
"""Largest first: larger ones are faster, and above this they gain nothing."""
SMALL_MICROBATCHES = (4096, 2048, 1024)
KV_SHARES = (1.0, 0.5, 0.25, 0.125)
"""Of what every running sequence would need at its longest. With less, sequences wait for each other."""
SMALL_KV_SHARES = (1 / 16, 1 / 32, 1 / 64, 1 / 128)
"""Tried where nothing else fits: of answers that may become very long few do."""
LEAST_RUNNING = 16
"""Sequences that an engine draws together where it is told to draw fewer: below, steps are as long for less."""


def fits(work: Workload, free_bytes: float, host_bytes: float = math.inf) -> bool:
    """Whether every kind of GPU has room for what it holds, and the memory of a host for what waits there."""
    plans = [plan_memory(side) for side in by_gpu(work).values()]
    return all(plan.needed_bytes <= free_bytes and plan.host_bytes <= host_bytes for plan in plans)


def choose(
    work: Workload, free_bytes: float, given: Mapping[str, Any], host_bytes: float = math.inf
) -> MemoryChoice | None:
    """The first combination that fits, in this order of what is given up: a large microbatch, stored activations,
    float32 states, bfloat16 states; then room in the cache. None: none fits.

    `work.choice` holds kv_tokens that are enough; `given` are values of a recipe, which are never changed.
    """
    if not fits(replace(work, choice=least_choice(work, given)), free_bytes, host_bytes):
        return None  # found at once, since many ways to share out GPUs are tried
    for candidate in candidates(work, given):
        if fits(replace(work, choice=candidate), free_bytes, host_bytes):
            return candidate
    return None


def candidates(work: Workload, given: Mapping[str, Any]) -> Iterator[MemoryChoice]:
    """Preferred ones first."""
    small = MICROBATCHES + SMALL_MICROBATCHES
    ways = ((MICROBATCHES, KV_SHARES[:1]), (small, KV_SHARES), *((small, (share,)) for share in SMALL_KV_SHARES))
    for microbatches, shares in ways:
        options: dict[str, tuple[Any, ...]] = {
            "states": possible_states(work),
            "gradient_checkpointing": (False, True),
            "kv_tokens": tuple(cache_tokens(work, share) for share in shares),
            "tokens_per_microbatch": microbatches,
        }
        for field, value in given.items():
            options[field] = (value,) if field != "kv_tokens" or value else (work.choice.kv_tokens,)
        for values in product(*options.values()):
            yield MemoryChoice(**dict(zip(options, values, strict=True)))


def possible_states(work: Workload) -> tuple[States, ...]:
    """The widest first. A block of 8-bit states may lie on two trainers that hold parts, so there they are refused."""
    return ("float32", "bfloat16") if work.parts else ("float32", "bfloat16", "8bit")


def fuller_caches(
    work: Workload, free_bytes: float, given: Mapping[str, Any], least_tokens: int, host_bytes: float = math.inf
) -> Iterator[MemoryChoice]:
    """What fits with each cache above so many tokens: for a fuller one something else is given up."""
    sizes = [] if "kv_tokens" in given else [cache_tokens(work, share) for share in KV_SHARES + SMALL_KV_SHARES]
    for size in sizes:
        choice = choose(work, free_bytes, {**given, "kv_tokens": size}, host_bytes) if size > least_tokens else None
        if choice is not None:
            yield choice


def least_choice(work: Workload, given: Mapping[str, Any]) -> MemoryChoice:
    """The least that can be asked for: everything is given up that a recipe does not give."""
    return list(candidates(work, given))[-1]


def cache_tokens(work: Workload, share: float) -> int:
    """Of a cache with this share of what there is; at least one whole sequence."""
    return max(int(work.choice.kv_tokens * share), work.row_tokens + 1)
