"""Trajectories become rows: token ids, a mask from lengths, log-probabilities as sampled. No credit yet.

Owns: masks (from lengths, never from ids) and forked rows. Refuses: credit (samples.py), packing (pack.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from temper.types import Completion, Group, Sample, Task, Trajectory

_PLAIN = frozenset({"token_ids", "loss_mask", "behavior_logprobs", "versions"})
_OPTIONAL = ("top_ids", "top_logprobs", "keep_ids")
"""Columns of a Completion and of a Sample that only some samplers fill."""

_Columns = dict[str, list[Any]]
"""Of one row, by their names in a Sample. Lists that grow as a whole: a step has hundreds of thousands of tokens."""


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
    """Which of several teachers reads its rows: its field "domain", else its source: "math" of "math.jsonl:17"."""
    return str(task.extra.get("domain", "")) or Path(task.id.partition(":")[0]).stem


def rows_of(trajectory: Trajectory, teacher: str = "") -> list[Sample]:
    """The rows of one episode, advantages and weights still 0.

    A turn whose prompt extends everything before it, id by id, continues the row, and what the environment or the
    template added is masked. A turn whose prompt rewrote history starts a new row: the policy never saw the old one.
    """
    drawn = [turn.completion for turn in trajectory.turns if turn.completion.token_ids]
    optional = [name for name in _OPTIONAL if any(getattr(completion, name) is not None for completion in drawn)]
    is_kept = {completion.keep_ids is not None for completion in drawn}
    assert len(is_kept) <= 1, "log-probabilities within a keep-set and over the whole vocabulary in one episode"
    rows: list[_Columns] = []
    for turn in trajectory.turns:
        completion = turn.completion
        prompt = list(completion.prompt_ids)
        seen = rows[-1]["token_ids"] if rows else []
        if not rows or prompt[: len(seen)] != seen:
            rows.append({name: [] for name in (*_PLAIN, *optional)})
            seen = []
        _append_given(rows[-1], prompt[len(seen) :])
        _append_drawn(rows[-1], completion)
    return [_sample(trajectory, teacher, row) for row in rows if 1 in row["loss_mask"]]


def with_column(rows: Sequence[Sample], name: str, columns: Sequence[list[float]]) -> list[Sample]:
    """The rows with one more column, one list per row."""
    changes: list[dict[str, Any]] = [{name: column} for column in columns]
    return [dataclasses.replace(row, **change) for row, change in zip(rows, changes, strict=True)]


def _append_given(row: _Columns, token_ids: list[int]) -> None:
    """Tokens that the policy did not draw."""
    size = len(token_ids)
    row["token_ids"] += token_ids
    row["loss_mask"] += [0] * size
    row["behavior_logprobs"] += [0.0] * size
    row["versions"] += [-1] * size
    for name in row.keys() - _PLAIN:
        row[name] += [[] for _ in token_ids]


def _append_drawn(row: _Columns, completion: Completion) -> None:
    size = len(completion.token_ids)
    row["token_ids"] += completion.token_ids
    row["loss_mask"] += [1] * size
    row["behavior_logprobs"] += completion.logprobs
    row["versions"] += completion.versions
    for name in row.keys() - _PLAIN:
        row[name] += getattr(completion, name) or [[] for _ in range(size)]


def _sample(trajectory: Trajectory, teacher: str, columns: _Columns) -> Sample:
    size, row = len(columns["token_ids"]), dict[str, Any](columns)
    return Sample(
        group_id=trajectory.group_id,
        index=trajectory.index,
        teacher=teacher,
        advantages=[0.0] * size,
        weights=[0.0] * size,
        reward=trajectory.score.value if trajectory.score.value is not None else 0.0,
        **row,
    )
