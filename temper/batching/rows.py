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
    has_top = any(turn.completion.top_ids is not None for turn in trajectory.turns)
    return [_sample(trajectory, row, has_top) for row in rows if any(entry.drawn for entry in row)]


def with_column(rows: Sequence[Sample], name: str, columns: Sequence[list[float]]) -> list[Sample]:
    """The rows with one more column, one list per row."""
    changes: list[dict[str, Any]] = [{name: column} for column in columns]
    return [dataclasses.replace(row, **change) for row, change in zip(rows, changes, strict=True)]


def _drawn(completion: Completion) -> Iterable[_Entry]:
    columns: list[Sequence[Any]] = [completion.token_ids, [1] * len(completion.token_ids)]
    columns += [completion.logprobs, completion.versions]
    if completion.top_ids is not None and completion.top_logprobs is not None:
        columns += [completion.top_ids, completion.top_logprobs]
    return map(_Entry._make, zip(*columns, strict=True)) if len(columns) == 6 else map(_Entry, *columns)


def _sample(trajectory: Trajectory, row: list[_Entry], has_top: bool) -> Sample:
    token_ids, loss_mask, logprobs, versions, top_ids, top_logprobs = (list(c) for c in zip(*row, strict=True))
    return Sample(
        group_id=trajectory.group_id,
        index=trajectory.index,
        token_ids=token_ids,
        loss_mask=loss_mask,
        behavior_logprobs=logprobs,
        versions=versions,
        advantages=[0.0] * len(row),
        weights=[0.0] * len(row),
        top_ids=top_ids if has_top else None,
        top_logprobs=top_logprobs if has_top else None,
        reward=trajectory.score.value if trajectory.score.value is not None else 0.0,
    )
