"""Which microbatches of an update are this rank's.

Owns: that, and how ranks that must make as many passes as others get to them. Refuses: packing (given).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from temper.errors import BackendError
from temper.trainer.passes.scoring import Share
from temper.trainer.ranks.context import context_of_rank
from temper.trainer.ranks.sums import rank_and_world
from temper.types import Microbatch

Shard = Callable[[Sequence[Microbatch], int, int], list[int]]
"""(microbatches, rank, number of ranks) -> places of those of this rank; may be empty."""


def share_of(microbatches: list[Microbatch], shard: Shard | None, *, is_even: bool) -> Share:
    """is_even: all ranks make as many passes. Whoever has fewer microbatches goes over the smallest of all instead."""
    rank, world = rank_and_world()
    if (context := context_of_rank()) is not None:  # its ranks have the same share
        rank, world = rank // context.size, world // context.size
    if world == 1:
        return Share(microbatches, list(range(len(microbatches))))
    if shard is None:
        raise BackendError(f"{world} trainer ranks but no `shard`: each would train the whole batch")
    places = shard(microbatches, rank, world)
    most = max(len(shard(microbatches, other, world)) for other in range(world)) if is_even else len(places)
    smallest = min(microbatches, key=lambda microbatch: sum(microbatch.lengths), default=None)
    padding = [smallest] * (most - len(places)) if smallest is not None else []
    return Share([microbatches[place] for place in places], places, padding)
