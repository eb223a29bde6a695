"""Cores of one machine, shared out between the trainer and sampler processes.

Owns: the arithmetic. Refuses: setting them (build/sampler.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """Of torch: in each sampler process, and in the trainer's."""

    sampler: int
    trainer: int


def share_threads(total: int, wanted: int | Literal["auto"], *, takes_turns: bool, num_samplers: int = 1) -> Threads:
    """Those who take turns have all of them, and the trainer keeps its own: a sum over more or fewer threads may have
    other bits. Those who work at the same time share: more threads than cores wait for each other."""
    if takes_turns:
        return Threads(sampler=max(1, total // num_samplers) if wanted == "auto" else wanted, trainer=total)
    sampler = max(1, total // 2 // num_samplers) if wanted == "auto" else wanted
    return Threads(sampler=sampler, trainer=max(1, total - num_samplers * sampler))
