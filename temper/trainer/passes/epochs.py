"""Rows that a batch trains more than once: to which epoch an update belongs, and what its rows know since the first.

Owns: columns of the batch's start, carried from epoch to epoch, and metrics by epoch. Refuses: computing them
(scoring.py), and sharing rows out over updates (batching/samples.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from temper.objectives import MetricSums
from temper.trainer.passes.scoring import Share
from temper.trainer.ranks.sums import tell_all_ranks
from temper.types import Microbatch, Sample, array_of

Name = tuple[str, int, bytes, bytes]
"""Group and member of a row, its tokens and its mask: whatever a pass finds is the same for rows of equal names."""
Fill = Callable[[Sequence[Microbatch]], list[Microbatch]]

FILLED = (
    "proximal_logprobs", "reference_logprobs", "teacher_logprobs", "top_ids", "top_logprobs", "router_ids",
    "router_logprobs",
)  # fmt: skip
"""Columns that passes fill before the first update of a batch."""


def epochs_of(updates: Sequence[Sequence[Sample]]) -> list[int]:
    """The epoch of each update, from 1: how often the batch has trained its first row by then."""
    return [
        1 + sum(any(_is_same(row, update[0]) for row in earlier) for earlier in updates[:number]) if update else 1
        for number, update in enumerate(updates)
    ]


def _is_same(row: Sample, other: Sample) -> bool:
    return (row.group_id, row.index) == (other.group_id, other.index) and _name_of(row) == _name_of(other)


def fill_once(updates: Sequence[Sequence[Sample]], shares: Sequence[Share], fill: Fill) -> list[Share]:
    """The shares of all updates with the columns that `fill` computes; rows of later epochs get those of the first.

    Every row is passed once, and no epoch can compare with anything but the start of its batch. Ranks tell each other
    what they found: a row may be another's in the next epoch.
    """
    epochs = epochs_of(updates)
    first = sum(epoch == 1 for epoch in epochs)  # these updates come before all others, and have every row once
    filled = [
        replace(share, microbatches=fill(share.microbatches), padding=fill(share.padding)) for share in shares[:first]
    ]
    if first == len(shares):
        return filled
    own: dict[Name, dict[str, Tensor]] = {}
    for update, share in zip(updates, filled, strict=False):
        for microbatch in share.microbatches:
            own |= _columns_of(microbatch, [_name_of(update[number]) for number in microbatch.rows])
    known = tell_all_ranks(own)

    def remembered(update: Sequence[Sample], microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        return [_with_known(m, [known[_name_of(update[number])] for number in m.rows]) for m in microbatches]

    for update, share in zip(updates[first:], shares[first:], strict=True):
        spare = remembered(update, share.padding)
        filled.append(replace(share, microbatches=remembered(update, share.microbatches), padding=spare))
    return filled


def _name_of(row: Sample) -> Name:
    return row.group_id, row.index, array_of(row.token_ids).tobytes(), array_of(row.loss_mask).tobytes()


def _columns_of(microbatch: Microbatch, names: Sequence[Name]) -> dict[Name, dict[str, Tensor]]:
    columns = {name: column for name in FILLED if (column := getattr(microbatch, name)) is not None}
    parts = {name: torch.split(column, list(microbatch.lengths)) for name, column in columns.items()}
    return {row: {name: part[place] for name, part in parts.items()} for place, row in enumerate(names)}


def _with_known(microbatch: Microbatch, rows: Sequence[Mapping[str, Tensor]]) -> Microbatch:
    columns: dict[str, Any] = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    return replace(microbatch, **columns)


def measure_updates(sums: Sequence[MetricSums]) -> dict[str, float]:
    """How many experts more than before the first update of a batch its last one found moved; {} when there was one, or
    no records of routes. `sums`: of each update. Rounding is in both, so that what is left is what the updates did."""
    if len(sums) < 2:
        return {}
    first, last = (own.finish().get("route/moved_frac") for own in (sums[0], sums[-1]))
    return {} if first is None or last is None else {"route/moved_by_updates": last - first}


def measure_epochs(updates: Sequence[Sequence[Sample]], sums: Sequence[MetricSums]) -> dict[str, float]:
    """How far each pass over the batch was from its start; {} when there was one. `sums`: of each update that trained
    the policy, which is all of them or none."""
    by_epoch: dict[int, MetricSums] = {}
    for epoch, own in zip(epochs_of(updates), sums, strict=False):
        by_epoch[epoch] = by_epoch.get(epoch, MetricSums()).merge(own)
    found: dict[str, float] = {}
    for epoch, whole in by_epoch.items() if len(by_epoch) > 1 else ():
        finished = whole.finish()
        clipped = [finished[name] for name in ("policy/clip_frac_high", "policy/clip_frac_low") if name in finished]
        if clipped:
            found[f"epochs/clip_frac/{epoch}"] = sum(clipped)
        if "policy/kl_old_k3" in finished:
            found[f"epochs/kl_old_k3/{epoch}"] = finished["policy/kl_old_k3"]
    return found
