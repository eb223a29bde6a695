"""Groups become rows to train on, each token with its advantage and its weight.

Owns: masks (from lengths, never from ids), forked rows, credit over the whole batch, weights per optimiser step.
Refuses: what credit is (objectives/) and how rows share a forward pass (pack.py).
Shapes: _B scored trajectories of the batch, _N their drawn tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from typing import Literal

import torch
from torch import Tensor

from temper.batching.measure import measure_advantages, measure_groups
from temper.objectives import Credit, Objective, advantages_of
from temper.types import Batch, Group, Sample, Trajectory

LogprobsFn = Callable[[Sequence[Sample], Literal["policy", "reference"]], list[list[float]]]
"""Trainer.logprobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditRules:
    """How a batch is credited: the same for every batch of a run."""

    objective: Objective
    max_new_tokens: int
    updates: int = 1
    """Optimiser steps per batch. A group is never split over two of them."""
    train_truncated: bool = True
    """False: completions cut at a limit are not trained; their rewards still count in the group's mean."""


def make_batch(
    groups: Sequence[Group],
    rules: CreditRules,
    *,
    logprobs: LogprobsFn,
    version: int,
    dropped: Sequence[tuple[Group, str]] = (),
) -> Batch:
    """Rows, then the log-probability passes that credit needs, then credit. What the loss needs, the trainer passes.

    `version` is that of the weights that will be trained. Order of arrival does not matter: groups are sorted by draw.
    """
    groups = sorted(groups, key=lambda group: group.draw)
    rows = rows_of_groups(groups)
    if "proximal" in rules.objective.needs:
        rows = with_logprobs(rows, proximal=logprobs(rows, "policy"), reference=logprobs(rows, "reference"))
    return assign_credit(rows, groups, rules, version=version, dropped=dropped)


def rows_of_groups(groups: Iterable[Group]) -> list[Sample]:
    """Rows of all trainable members, in order of group and member, without credit."""
    return [row for group in groups for trajectory in group.trainable for row in rows_of(trajectory)]


def rows_of(trajectory: Trajectory) -> list[Sample]:
    """The rows of one episode, advantages and weights still 0.

    A turn whose prompt extends everything before it, id by id, continues the row, and what the environment or the
    template added is masked. A turn whose prompt rewrote history starts a new row: the policy never saw the old one.
    """
    rows: list[list[tuple[int, int, float, int]]] = []
    for turn in trajectory.turns:
        completion = turn.completion
        prompt = list(completion.prompt_ids)
        seen = [entry[0] for entry in rows[-1]] if rows else []
        if not rows or prompt[: len(seen)] != seen:
            rows.append([])
            seen = []
        rows[-1] += [(token, 0, 0.0, -1) for token in prompt[len(seen) :]]
        drawn = zip(completion.token_ids, completion.logprobs, completion.versions, strict=True)
        rows[-1] += [(token, 1, logprob, version) for token, logprob, version in drawn]
    return [_sample(trajectory, row) for row in rows if any(entry[1] for entry in row)]


def with_logprobs(
    rows: Sequence[Sample], *, proximal: list[list[float]] | None = None, reference: list[list[float]] | None = None
) -> list[Sample]:
    """The rows with log-probabilities of other policies, one list per row; None leaves them out."""
    return [
        dataclasses.replace(
            row,
            proximal_logprobs=row.proximal_logprobs if proximal is None else proximal[place],
            reference_logprobs=row.reference_logprobs if reference is None else reference[place],
        )
        for place, row in enumerate(rows)
    ]


def assign_credit(
    rows: Sequence[Sample],
    groups: Sequence[Group],
    rules: CreditRules,
    *,
    version: int,
    dropped: Sequence[tuple[Group, str]] = (),
) -> Batch:
    """Fills advantages and weights. Statistics are over whole groups and the whole batch; denominators per update.

    Updates without a single row (everything truncated and not trained) are left out: an optimiser step without
    gradient would still move the weights by its momentum.
    """
    members = [trajectory for group in groups for trajectory in group.trainable]
    rows_by_member = _by_member(rows)
    member_rows = [rows_by_member[trajectory.group_id, trajectory.index] for trajectory in members]
    credit = _credit(groups, members, member_rows, rules)
    advantages = advantages_of(rules.objective, credit)
    # Both shapes are allowed; where B = N every trajectory has one token and they mean the same.
    advantages_N = advantages.repeat_interleave(credit.lengths) if len(advantages) == len(members) else advantages
    assert len(advantages_N) == int(credit.lengths.sum()), "advantages must be per trajectory or per drawn token"
    update_B = _update_of_groups(len(groups), rules.updates)[credit.group_ids]
    weights_B = _weights(credit, update_B, rules)
    updates: list[list[Sample]] = [[] for _ in range(rules.updates)]
    given_N = iter(advantages_N.tolist())
    for rows_here, update, weight in zip(member_rows, update_B.tolist(), weights_B.tolist(), strict=True):
        filled = [_filled(row, given_N, weight) for row in rows_here]
        updates[update] += filled if weight > 0 else []
    metrics = measure_groups(groups, dropped, version) | measure_advantages(advantages_N, credit.lengths)
    return Batch(
        updates=tuple(tuple(update) for update in updates if update),
        groups=tuple(groups),
        dropped=tuple(dropped),
        metrics=metrics,
    )


def _sample(trajectory: Trajectory, row: list[tuple[int, int, float, int]]) -> Sample:
    token_ids, loss_mask, logprobs, versions = (list(column) for column in zip(*row, strict=True))
    return Sample(
        group_id=trajectory.group_id,
        index=trajectory.index,
        token_ids=token_ids,
        loss_mask=loss_mask,
        behavior_logprobs=logprobs,
        versions=versions,
        advantages=[0.0] * len(row),
        weights=[0.0] * len(row),
    )


def _by_member(rows: Sequence[Sample]) -> dict[tuple[str, int], list[Sample]]:
    by_member: dict[tuple[str, int], list[Sample]] = {}
    for row in rows:
        by_member.setdefault((row.group_id, row.index), []).append(row)
    return by_member


def _credit(
    groups: Sequence[Group], members: Sequence[Trajectory], member_rows: Sequence[list[Sample]], rules: CreditRules
) -> Credit:
    # By place in the batch, not by task: the same task drawn twice is two groups with two baselines.
    group_ids = [place for place, group in enumerate(groups) for _ in group.trainable]
    log_ratio_N = None
    if {"reference", "proximal"} <= rules.objective.needs:
        log_ratios = [gap for rows in member_rows for row in rows for gap in _reference_gaps(row)]
        log_ratio_N = torch.tensor(log_ratios, dtype=torch.float64)
    return Credit(
        rewards=torch.tensor([reward for group in groups for reward in group.rewards], dtype=torch.float64),
        group_ids=torch.tensor(group_ids, dtype=torch.int64),
        lengths=torch.tensor([sum(row.num_actions for row in rows) for rows in member_rows], dtype=torch.int64),
        is_truncated=torch.tensor([trajectory.is_truncated for trajectory in members], dtype=torch.bool),
        max_new_tokens=rules.max_new_tokens,
        reference_log_ratio=log_ratio_N,
    )


def _reference_gaps(row: Sample) -> Iterable[float]:
    """Proximal minus reference log-probability of each drawn token."""
    assert row.proximal_logprobs is not None, "credit needs the proximal pass"
    assert row.reference_logprobs is not None, "credit needs the reference pass"
    gaps = (ours - theirs for ours, theirs in zip(row.proximal_logprobs, row.reference_logprobs, strict=True))
    return compress(gaps, row.loss_mask)


def _update_of_groups(num_groups: int, updates: int) -> Tensor:
    """Which optimiser step trains each group: consecutive groups, as even as possible."""
    return torch.arange(num_groups) * updates // max(1, num_groups)


def _weights(credit: Credit, update_B: Tensor, rules: CreditRules) -> Tensor:
    """Weight of each token of a trajectory; 0 for trajectories that are not trained.

    Each update is a batch of its own: a trajectory that it does not train has length 0 there and counts nowhere.
    """
    is_trained_B = torch.ones_like(credit.is_truncated) if rules.train_truncated else ~credit.is_truncated
    weights_B = torch.zeros_like(credit.rewards)
    for update in range(rules.updates):
        lengths_B = credit.lengths * (is_trained_B & (update_B == update))
        weights_B += rules.objective.weighting(lengths_B, credit.group_ids, rules.max_new_tokens)
    return weights_B


def _filled(row: Sample, advantages: Iterable[float], weight: float) -> Sample:
    """The row with credit on its drawn tokens and zeros elsewhere. Takes as many advantages as it has drawn tokens."""
    own = islice(iter(advantages), row.num_actions)
    return dataclasses.replace(
        row,
        advantages=[next(own) if drawn else 0.0 for drawn in row.loss_mask],
        weights=[weight if drawn else 0.0 for drawn in row.loss_mask],
    )
