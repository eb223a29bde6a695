"""Rows share forward passes: laid end to end under a token budget, then spread over ranks.

Owns: which rows go together. Refuses: any say in the gradient; weights were made before and do not depend on it.
Shapes: everything in a Microbatch is [T], all tokens of its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from temper.types import Microbatch, Sample, array_of
from temper.types.columns import no_lists, ragged

Row = tuple[int, Sample]
"""A sample and its number among those that are packed."""
Rollout = list[Row]
"""The rows of one trajectory. They stay together: sequence-level ratios sum over all of them."""
Block = list[Rollout]
"""What is never split over two microbatches."""


def pack(
    samples: Sequence[Sample],
    tokens_per_microbatch: int,
    dtype: torch.dtype = torch.float32,
    together: Literal["trajectory", "group"] = "trajectory",
) -> list[Microbatch]:
    """Microbatches of at most `tokens_per_microbatch` tokens, long rows first.

    Rows of a group meet, because they begin alike and what they have in common is computed once; and groups of similar
    length, because attention pads rows. Rows without credit share none with others: most objectives need no
    backward pass for them. What stays together, a trajectory or all trajectories of a group side by side in order of
    index, and is longer than the budget, gets a microbatch of its own. The result depends on the set of rows, not on
    their order.
    """
    longest: dict[str, int] = {}
    for sample in samples:
        longest[sample.group_id] = max(longest.get(sample.group_id, 0), len(sample.token_ids))

    def long_first(block: Block) -> tuple[int, str, int, int]:
        _, first = block[0][0]
        return -longest[first.group_id], first.group_id, -_longest_row(block), first.index

    blocks = sorted(_blocks(_rollouts(samples), together), key=long_first)
    credited, uncredited = [b for b in blocks if _has_credit(b)], [b for b in blocks if not _has_credit(b)]
    packed = _packed(credited, tokens_per_microbatch) + _packed(uncredited, tokens_per_microbatch)
    return [_microbatch(rollouts, dtype) for rollouts in packed]


def pack_over_ranks(
    samples: Sequence[Sample], tokens_per_microbatch: int, num_ranks: int, **options: Any
) -> list[Microbatch]:
    """As pack(); into smaller microbatches where there would be fewer of them than ranks, and some would do nothing."""
    packed = pack(samples, tokens_per_microbatch, **options)
    if len(packed) >= min(num_ranks, len(samples)):
        return packed
    share = -(-sum(len(sample.token_ids) for sample in samples) // num_ranks)
    return pack(samples, min(share, tokens_per_microbatch), **options)


def _packed(blocks: Iterable[Block], tokens_per_microbatch: int) -> list[list[Rollout]]:
    packed: list[list[Rollout]] = []
    room = 0
    for block in blocks:
        size = sum(len(row.token_ids) for rollout in block for _, row in rollout)
        if not packed or size > room:
            packed.append([])
            room = tokens_per_microbatch
        packed[-1] += block
        room -= size
    return packed


def shard(microbatches: Sequence[Microbatch], rank: int, world: int) -> list[int]:
    """Places of the microbatches of one rank: most tokens first, each to the rank with the fewest so far. May be
    empty."""
    loads = [0] * world
    share = []
    for place in sorted(range(len(microbatches)), key=lambda place: -sum(microbatches[place].lengths)):
        lightest = loads.index(min(loads))
        loads[lightest] += sum(microbatches[place].lengths)
        if lightest == rank:
            share.append(place)
    return sorted(share)


def _rollouts(samples: Iterable[Sample]) -> list[Rollout]:
    rollouts: dict[tuple[str, int], Rollout] = {}
    for number, sample in enumerate(samples):
        rollouts.setdefault((sample.group_id, sample.index), []).append((number, sample))
    return list(rollouts.values())


def _blocks(rollouts: Sequence[Rollout], together: Literal["trajectory", "group"]) -> list[Block]:
    if together == "trajectory":
        return [[rollout] for rollout in rollouts]
    groups: dict[str, Block] = {}
    for rollout in sorted(rollouts, key=lambda rollout: rollout[0][1].index):
        groups.setdefault(rollout[0][1].group_id, []).append(rollout)
    return list(groups.values())


def _has_credit(block: Block) -> bool:
    return any(array_of(row.advantages).any() for rollout in block for _, row in rollout)


def _longest_row(block: Block) -> int:
    return max(len(row.token_ids) for rollout in block for _, row in rollout)


def _microbatch(rollouts: Sequence[Rollout], dtype: torch.dtype) -> Microbatch:
    rows = [row for rollout in rollouts for _, row in rollout]
    lengths = torch.tensor([len(row.token_ids) for row in rows])
    keep_ids, keep_counts = _keep_sets(rows)
    trajectory_of_row = [place for place, rollout in enumerate(rollouts) for _ in rollout]
    return Microbatch(
        token_ids=_integers(row.token_ids for row in rows),
        positions=torch.cat([torch.arange(len(row.token_ids)) for row in rows]),
        sequence_ids=torch.arange(len(rows)).repeat_interleave(lengths),
        trajectory_ids=torch.tensor(trajectory_of_row).repeat_interleave(lengths),
        loss_mask=_integers(row.loss_mask for row in rows),
        behavior_logprobs=_floats((row.behavior_logprobs for row in rows), dtype),
        advantages=_floats((row.advantages for row in rows), dtype),
        weights=_floats((row.weights for row in rows), dtype),
        versions=_integers(row.versions for row in rows),
        lengths=tuple(lengths.tolist()),
        rows=tuple(number for rollout in rollouts for number, _ in rollout),
        rewards=torch.tensor([row.reward for row in rows], dtype=dtype).repeat_interleave(lengths),
        weight_slopes=torch.tensor([row.weight_slope for row in rows], dtype=dtype).repeat_interleave(lengths),
        teachers=tuple(row.teacher for row in rows),
        proximal_logprobs=_optional([row.proximal_logprobs for row in rows], dtype),
        reference_logprobs=_optional([row.reference_logprobs for row in rows], dtype),
        teacher_logprobs=_optional([row.teacher_logprobs for row in rows], dtype),
        values=_optional([row.values for row in rows], dtype),
        targets=_optional([row.targets for row in rows], dtype),
        top_ids=_table([row.top_ids for row in rows], torch.int32),
        top_logprobs=_table([row.top_logprobs for row in rows], dtype),
        keep_ids=keep_ids,
        keep_counts=keep_counts,
        **_routes(rows),
    )


def _routes(rows: Sequence[Sample]) -> dict[str, Tensor]:
    """Microbatch.routes and is_routed; empty when no row has routes. Rows of a batch without are routed anew."""
    known = [ragged(row.routes) for row in rows if row.routes is not None]
    if not any(len(column.flat) for column in known):
        return {}
    columns = [no_lists(len(row.token_ids), known[0]) if row.routes is None else ragged(row.routes) for row in rows]
    dtype = torch.uint8 if known[0].values.dtype == np.uint8 else torch.int16
    table = _table(columns, dtype)
    assert table is not None, "some row has routes"
    return {"routes": table, "is_routed": torch.from_numpy(np.concatenate([c.counts for c in columns]) > 0)}


def _integers(columns: Iterable[Sequence[int]]) -> Tensor:
    return torch.from_numpy(np.concatenate([array_of(column) for column in columns], dtype=np.int64))


def _floats(columns: Iterable[Sequence[float]], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.concatenate([array_of(column) for column in columns])).to(dtype)


def _optional(columns: Sequence[Sequence[float] | None], dtype: torch.dtype) -> Tensor | None:
    """One tensor, or None when no row has the column. Some rows with and some without would be a broken batch."""
    present = [column for column in columns if column is not None]
    assert len(present) in (0, len(columns)), "either all rows of a batch have these log-probabilities or none"
    return _floats(present, dtype) if present else None


def _table(columns: Sequence[Sequence[Sequence[Any]] | None], dtype: torch.dtype) -> Tensor | None:
    """[T, K] with zeros where a position has no entries; None when no row has the column."""
    present = [ragged(column) for column in columns if column is not None]
    assert len(present) in (0, len(columns)), "either all rows of a batch have their most likely tokens or none"
    if not present:
        return None
    counts = np.concatenate([column.counts for column in present])
    width = int(counts.max(initial=0))
    assert np.isin(counts, (0, width)).all(), "every position has as many most likely tokens, or none"
    filled = torch.empty(len(counts), width, dtype=dtype)
    start = 0
    for column in present:
        rows = filled[start : start + len(column)].numpy()
        rows[column.counts == 0] = 0
        for begin, end in _stretches(column.counts > 0):
            rows[begin:end] = column.values[column.offsets[begin] : column.offsets[end]].reshape(-1, width)
        start += len(column)
    return filled


def _stretches(is_filled: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Where it is True, as (first place, place behind the last) of neighbours: one for each turn that was drawn."""
    edges = np.flatnonzero(np.diff(is_filled, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _keep_sets(rows: Sequence[Sample]) -> tuple[tuple[NDArray[np.int32], ...], Tensor] | tuple[None, None]:
    """Microbatch.keep_ids and keep_counts; None when no row has keep-sets.

    Log-probabilities within a keep-set and over the whole vocabulary are different things: a batch holds one kind.
    """
    columns = [ragged(row.keep_ids, np.int32) for row in rows if row.keep_ids is not None]
    assert len(columns) in (0, len(rows)), "either all rows of a batch have keep-sets or none"
    if not columns:
        return None, None
    for row, column in zip(rows, columns, strict=True):
        # Without it the drawn token would have probability 0, and the loss would be infinite.
        places = np.flatnonzero(column.flat == np.repeat(array_of(row.token_ids), column.counts))
        owners = np.searchsorted(column.offsets, places + column.offsets[0], side="right") - 1
        is_whole = np.array_equal(np.bincount(owners, minlength=len(column)), array_of(row.loss_mask))
        assert is_whole, "a keep-set holds the drawn token once, and there is none where nothing was drawn"
    return tuple(column.flat for column in columns), torch.from_numpy(np.concatenate([c.counts for c in columns]))
