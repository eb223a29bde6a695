"""Trajectories become rows: token ids, a mask from lengths, log-probabilities as sampled. No credit yet.

Owns: masks (from lengths, never from ids) and forked rows. Refuses: credit (samples.py), packing (pack.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from temper.types import Completion, Group, Sample, Trajectory


class _Entry(NamedTuple):
    """One token of a row."""

    token: int
    drawn: int = 0
    logprob: float = 0.0
    version: int = -1
    top_ids: list[int] = []  # noqa: RUF012 - never changed
    top_logprobs: list[float] = []  # noqa: RUF012
    keep_ids: list[int] = []  # noqa: RUF012


_OPTIONAL = ("top_ids", "top_logprobs", "keep_ids")
"""Columns of a Completion and of a Sample that only some samplers fill; the last fields of _Entry, in this order."""


def rows_of_groups(groups: Iterable[Group]) -> list[Sample]:
    """Rows of all trainable members, in order of group and member, without credit."""
    return [row for group in groups for trajectory in group.trainable for row in rows_of(trajectory)]


def rows_of(trajectory: Trajectory) -> list[Sample]:
    """The rows of one episode, advantages and weights still 0.

    A turn whose prompt extends everything before it, id by id, continues the row, and what the environment or the
    template added is masked. A turn whose prompt rewrote history starts a new row: the policy never saw the old one.
    """
    rows: list[list[_Entry]] = []
    for turn in trajectory.turns:
        completion = turn.completion
        prompt = list(completion.prompt_ids)
        seen = [entry.token for entry in rows[-1]] if rows else []
        if not rows or prompt[: len(seen)] != seen:
            rows.append([])
            seen = []
        rows[-1] += [_Entry(token) for token in prompt[len(seen) :]]
        rows[-1] += _drawn(completion)
    drawn = [turn.completion for turn in trajectory.turns if turn.completion.token_ids]
    columns = [name for name in _OPTIONAL if any(getattr(completion, name) is not None for completion in drawn)]
    is_kept = {completion.keep_ids is not None for completion in drawn}
    assert len(is_kept) <= 1, "log-probabilities within a keep-set and over the whole vocabulary in one episode"
    return [_sample(trajectory, row, columns) for row in rows if any(entry.drawn for entry in row)]


def with_column(rows: Sequence[Sample], name: str, columns: Sequence[list[float]]) -> list[Sample]:
    """The rows with one more column, one list per row."""
    changes: list[dict[str, Any]] = [{name: column} for column in columns]
    return [dataclasses.replace(row, **change) for row, change in zip(rows, changes, strict=True)]


def _drawn(completion: Completion) -> Iterable[_Entry]:
    size = len(completion.token_ids)
    optional = [getattr(completion, name) for name in _OPTIONAL]
    columns: list[Sequence[Any]] = [completion.token_ids, [1] * size, completion.logprobs, completion.versions]
    columns += [[[]] * size if column is None else column for column in optional]
    return map(_Entry._make, zip(*columns, strict=True))


def _sample(trajectory: Trajectory, row: list[_Entry], columns: Sequence[str]) -> Sample:
    """`columns`: those of _OPTIONAL that the sampler filled."""
    optional: dict[str, Any] = {name: [getattr(entry, name) for entry in row] for name in columns}
    return Sample(
        group_id=trajectory.group_id,
        index=trajectory.index,
        token_ids=[entry.token for entry in row],
        loss_mask=[entry.drawn for entry in row],
        behavior_logprobs=[entry.logprob for entry in row],
        versions=[entry.version for entry in row],
        advantages=[0.0] * len(row),
        weights=[0.0] * len(row),
        reward=trajectory.score.value if trajectory.score.value is not None else 0.0,
        **optional,
    )
