"""Trajectories become rows: token ids, a mask from lengths, log-probabilities as sampled. No credit yet.

Owns: masks (from lengths, never from ids) and forked rows. Refuses: credit (samples.py), packing (pack.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from temper.types import Column, Completion, Group, Ragged, Sample, Task, Trajectory, array_of, join_ragged, no_lists
from temper.types.columns import ragged
from temper.types.routes import continue_routes

_OPTIONAL = ("top_ids", "top_logprobs", "keep_ids")
"""Columns of a Completion and of a Sample that only some samplers fill."""


def rows_of_groups(groups: Iterable[Group]) -> list[Sample]:
    """Rows of all trainable members, in order of group and member, without credit."""
    groups = list(groups)
    # Their log-probabilities are of another distribution: as the behaviour policy's they would make any ratio wrong.
    assert not any(t.is_opponents for group in groups for t in group.trajectories), "opponents get no policy gradient"
    return [
        row
        for group in groups
        for trajectory in group.trainable
        for row in rows_of(trajectory, teacher=domain_of(group.task))
    ]


def domain_of(task: Task) -> str:
    """Domain of a task, for choosing among teachers: its field "domain", else its source, "math" of "math.jsonl:17"."""
    return str(task.extra.get("domain", "")) or Path(task.id.partition(":")[0]).stem


def rows_of(trajectory: Trajectory, teacher: str = "") -> list[Sample]:
    """The rows of one episode, advantages and weights still 0.

    A turn whose prompt extends everything before it, id by id, continues the row, and what the environment or the
    template added is masked. A turn whose prompt rewrote history starts a new row: the policy never saw the old one.
    """
    drawn = [turn.completion for turn in trajectory.turns if turn.completion.token_ids]
    known = {name: [getattr(completion, name) for completion in drawn] for name in _OPTIONAL}
    optional = {name: next(c for c in found if c is not None) for name, found in known.items() if any(found)}
    is_kept = {completion.keep_ids is not None for completion in drawn}
    assert len(is_kept) <= 1, "log-probabilities within a keep-set and over the whole vocabulary in one episode"
    rows: list[list[_Stretch]] = []
    seen = np.empty(0, dtype=np.int32)
    for turn in trajectory.turns:
        completion = turn.completion
        prompt = np.array(completion.prompt_ids, dtype=np.int32)
        if not rows or not np.array_equal(prompt[: len(seen)], seen):
            rows.append([])
            seen = seen[:0]
        rows[-1].append(_Stretch(prompt[len(seen) :], completion))
        seen = np.concatenate((prompt, array_of(completion.token_ids)))
    return [
        _sample(trajectory, teacher, row, optional) for row in rows if any(stretch.drawn.token_ids for stretch in row)
    ]


def with_column(rows: Sequence[Sample], name: str, columns: Sequence[Sequence[float]]) -> list[Sample]:
    """The rows with one more column, one per row."""
    changes: list[dict[str, Any]] = [{name: column} for column in columns]
    return [dataclasses.replace(row, **change) for row, change in zip(rows, changes, strict=True)]


class _Stretch(NamedTuple):
    """A piece of a row: tokens that the policy was given, and those that it drew after them."""

    given: NDArray[np.int32]
    drawn: Completion


def _sample(
    trajectory: Trajectory, teacher: str, row: Sequence[_Stretch], optional: Mapping[str, Ragged[Any]]
) -> Sample:
    """`optional`: columns of lists to fill, each with one of its kind."""
    columns: dict[str, Any] = {name: _lists(row, name, like) for name, like in optional.items()}
    num_given = [len(stretch.given) for stretch in row]
    length = sum(num_given) + sum(len(stretch.drawn.token_ids) for stretch in row)
    columns["routes"] = _routes(row, length)
    zeros = Column[float](np.zeros(length))
    return Sample(
        group_id=trajectory.group_id,
        index=trajectory.index,
        teacher=teacher,
        token_ids=_column(row, "token_ids", [stretch.given for stretch in row]),
        loss_mask=_column(row, "loss_mask", [np.zeros(size, np.uint8) for size in num_given]),
        behavior_logprobs=_column(row, "logprobs", [np.zeros(size, np.float32) for size in num_given]),
        versions=_column(row, "versions", [np.full(size, -1, np.int32) for size in num_given]),
        advantages=zeros,
        weights=zeros,
        reward=trajectory.score.value if trajectory.score.value is not None else 0.0,
        **columns,
    )


def _routes(row: Sequence[_Stretch], length: int) -> Ragged[Any] | None:
    """None: some turn that drew tokens tells none, and they take their routers' choice (route/recorded_frac)."""
    told = [stretch.drawn for stretch in row if stretch.drawn.token_ids]  # of a turn that drew nothing nobody may know
    if any(completion.routes is None for completion in told):
        return None
    # Each turn's are over all of its prompt, the turns before it included.
    routes = reduce(continue_routes, (ragged(completion.routes or ()) for completion in told))
    return join_ragged([routes, no_lists(length - len(routes), routes)])


def _column(row: Sequence[_Stretch], name: str, given: Sequence[NDArray[Any]]) -> Column[Any]:
    return _woven(given, [array_of(getattr(stretch.drawn, name)) for stretch in row])


def _woven(given: Sequence[NDArray[Any]], drawn: Sequence[NDArray[Any]]) -> Column[Any]:
    """The first given piece, the first drawn one, the second given one ..."""
    return Column(np.concatenate([part for pair in zip(given, drawn, strict=True) for part in pair]))


def _lists(row: Sequence[_Stretch], name: str, like: Ragged[Any]) -> Ragged[Any]:
    """A column of lists: empty ones at tokens that were given, and in turns that lack the column."""
    pieces = []
    for stretch in row:
        column: Ragged[Any] | None = getattr(stretch.drawn, name)
        pieces.append(no_lists(len(stretch.given), like))
        pieces.append(no_lists(len(stretch.drawn.token_ids), like) if column is None else column)
    return join_ragged(pieces)
