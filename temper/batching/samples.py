"""Groups become rows to train on, each token with its advantage and its weight.

Owns: the passes that credit needs, credit over the whole batch, weights per optimiser step.
Refuses: what credit is (objectives/), what a row is (rows.py), how rows share a forward pass (pack.py).
Shapes: _B scored trajectories of the batch, _N their drawn tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from temper.batching.measure import measure_advantages, measure_groups, measure_shaping
from temper.batching.rows import rows_of_groups, with_column
from temper.objectives import Credit, Extent, Objective, SlopedWeighting, advantages_of, targets_of
from temper.types import Batch, Column, Group, Sample, Trajectory, Turn, array_of

Scorer = Literal["policy", "reference", "teacher", "critic"]
ScoreFn = Callable[[Sequence[Sample], Scorer], Sequence[Sequence[float]]]
"""Trainer.score."""

_PASSES: dict[str, tuple[str, Scorer]] = {
    "proximal": ("proximal_logprobs", "policy"),
    "reference": ("reference_logprobs", "reference"),
    "teacher": ("teacher_logprobs", "teacher"),
    "values": ("values", "critic"),
}
"""By need of a credit factor: the column it fills and who computes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditRules:
    """How a batch is credited: the same for every batch of a run."""

    objective: Objective
    max_new_tokens: int
    max_episode_tokens: int = 0
    """As in Credit."""
    updates: int = 1
    """Optimiser steps of one pass over a batch. A group is never split over two of them."""
    epochs: int = 1
    """Passes over a batch. Credit is the same in all of them; from the second on groups are shared out anew."""
    train_truncated: bool = True
    """False: completions cut at a limit are not trained; their rewards still count in the group's mean."""
    part_weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of the reward's parts, for advantages that credit each part alone."""
    seed: int = 0
    """Seed of the run, for factors that draw."""


def make_batch(
    groups: Sequence[Group],
    rules: CreditRules,
    *,
    score: ScoreFn,
    version: int,
    dropped: Sequence[tuple[Group, str]] = (),
    scales: Mapping[str, float] | None = None,
) -> Batch:
    """Rows, then the passes that credit needs, then credit. What the loss needs beyond that, the trainer passes.

    `version` is that of the weights that will be trained; `scales` are those of the objective's controllers. Order of
    arrival does not matter: groups are sorted by draw.
    """
    groups = sorted(groups, key=lambda group: group.draw)
    rows = rows_of_groups(groups)
    for need, (column, scorer) in _PASSES.items():
        if need in rules.objective.credit_needs:
            scored = _over_vocabulary(rows) if need == "proximal" else rows
            rows = with_column(rows, column, score(scored, scorer))
    return assign_credit(rows, groups, rules, version=version, dropped=dropped, scales=scales)


def _over_vocabulary(rows: Sequence[Sample]) -> list[Sample]:
    """The rows as if each token had been drawn among all: credit takes the distance between whole policies."""
    return [row if row.keep_ids is None else dataclasses.replace(row, keep_ids=None) for row in rows]


def assign_credit(
    rows: Sequence[Sample],
    groups: Sequence[Group],
    rules: CreditRules,
    *,
    version: int,
    dropped: Sequence[tuple[Group, str]] = (),
    scales: Mapping[str, float] | None = None,
) -> Batch:
    """Fills advantages and weights. Statistics are over whole groups and the whole batch; denominators per update.

    Updates without a single row (everything truncated and not trained) are left out: an optimiser step without
    gradient would still move the weights by its momentum.
    """
    members = [trajectory for group in groups for trajectory in group.trainable]
    rows_by_member = _by_member(rows)
    member_rows = [rows_by_member[trajectory.group_id, trajectory.index] for trajectory in members]
    credit = _credit(groups, members, member_rows, rules, version)
    credit = dataclasses.replace(credit, scales=scales or {})
    advantages = advantages_of(rules.objective, credit, None if rules.train_truncated else ~credit.is_truncated)
    targets = targets_of(rules.objective, credit)
    filled: list[Sample] = []
    updates: list[list[Sample]] = []
    for epoch in range(rules.epochs):
        update_B = _update_of_groups(groups, rules, version, epoch)[credit.group_ids]
        weights = _weights(credit, update_B, advantages.is_kept, rules)
        if epoch == 0:
            filled = _filled(member_rows, advantages.tokens, targets, *weights)
        else:  # the same rows: only what a token counts among those of its update is another
            filled = _weighed_anew(member_rows, filled, *weights)
        updates += _shared_out(member_rows, filled, update_B, weights[0], rules.updates)
    metrics = measure_groups(groups, dropped, version) | measure_shaping(rules.objective, credit)
    metrics |= measure_advantages(advantages.tokens, credit.lengths)
    return Batch(
        updates=tuple(tuple(update) for update in updates if update),
        groups=tuple(groups),
        dropped=tuple(dropped),
        metrics=metrics,
    )


def _shared_out(
    member_rows: Sequence[Sequence[Sample]], filled: Sequence[Sample], update_B: Tensor, weights_B: Tensor, num: int
) -> list[list[Sample]]:
    """The rows of each of the `num` updates of one epoch, without those of members that are not trained."""
    updates: list[list[Sample]] = [[] for _ in range(num)]
    rest = iter(filled)
    for own, update, weight in zip(member_rows, update_B.tolist(), weights_B.tolist(), strict=True):
        credited = list(islice(rest, len(own)))
        updates[update] += credited if weight > 0 else []
    return updates


def _by_member(rows: Sequence[Sample]) -> dict[tuple[str, int], list[Sample]]:
    by_member: dict[tuple[str, int], list[Sample]] = {}
    for row in rows:
        by_member.setdefault((row.group_id, row.index), []).append(row)
    return by_member


def _credit(
    groups: Sequence[Group],
    members: Sequence[Trajectory],
    member_rows: Sequence[list[Sample]],
    rules: CreditRules,
    version: int,
) -> Credit:
    rows = [row for own in member_rows for row in own]
    # By place in the batch, not by task: the same task drawn twice is two groups with two baselines.
    group_ids = [place for place, group in enumerate(groups) for _ in group.trainable]
    lengths = [sum(row.num_actions for row in own) for own in member_rows]
    steps, turns = _steps(members, lengths), _turns(members)
    return Credit(
        rewards=_float64(reward for group in groups for reward in group.rewards),
        group_ids=torch.tensor(group_ids, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        is_truncated=torch.tensor([trajectory.is_truncated for trajectory in members], dtype=torch.bool),
        max_new_tokens=rules.max_new_tokens,
        max_episode_tokens=rules.max_episode_tokens,
        reward_parts=_reward_parts(members),
        part_weights=rules.part_weights,
        greedy_rewards=_greedy_rewards(groups),
        behavior_logprobs=_drawn(rows, "behavior_logprobs"),
        proximal_logprobs=_drawn(rows, "proximal_logprobs"),
        reference_logprobs=_drawn(rows, "reference_logprobs"),
        teacher_logprobs=_drawn(rows, "teacher_logprobs"),
        values=_drawn(rows, "values"),
        turn_ids=turns[0],
        turn_rewards=turns[1],
        turn_states=_turn_states(members),
        step_ids=None if steps is None else steps[0],
        step_values=None if steps is None else steps[1],
        member_keys=torch.tensor([_key(rules.seed, version, member) for member in members], dtype=torch.int64),
    )


def _float64(values: Iterable[float]) -> Tensor:
    return torch.from_numpy(np.fromiter(values, dtype=np.float64))


def _drawn(rows: Sequence[Sample], name: str) -> Tensor | None:
    """A column at the drawn tokens of all rows, in order; None when the rows lack it."""
    columns = [getattr(row, name) for row in rows]
    if any(column is None for column in columns):
        return None
    if not rows:
        return _float64(())
    pairs = zip(columns, rows, strict=True)
    drawn = [array_of(column)[array_of(row.loss_mask, np.bool_)] for column, row in pairs]
    return torch.from_numpy(np.concatenate(drawn, dtype=np.float64))


def _reward_parts(members: Sequence[Trajectory]) -> dict[str, Tensor]:
    """What each part added to the reward of all members; NaN where a member lacks it or it has no value."""
    names = dict.fromkeys(name for member in members for name in member.weighted_parts)
    scores = {name: [member.weighted_parts.get(name) for member in members] for name in names}
    return {
        name: _float64(math.nan if s is None or s.value is None else s.value for s in column)
        for name, column in scores.items()
    }


def _greedy_rewards(groups: Sequence[Group]) -> Tensor | None:
    """Reward of the greedy attempt at each member's task; None when there was none."""
    if not groups or any(group.greedy is None for group in groups):
        return None
    scores = [group.greedy.score.value for group in groups if group.greedy is not None for _ in group.trainable]
    assert all(score is not None for score in scores), "a group without a greedy score is not trained"
    return _float64(score for score in scores if score is not None)


def _steps(members: Sequence[Trajectory], lengths: Sequence[int]) -> tuple[Tensor, Tensor] | None:
    """For each drawn token: the number of its step, and the value of the state in which that step begins."""
    if not members or not all(member.step_starts for member in members):
        return None
    starts = [(*member.step_starts, length) for member, length in zip(members, lengths, strict=True)]
    sizes = torch.from_numpy(np.concatenate([np.diff(one) for one in starts]))
    ids = torch.from_numpy(np.concatenate([np.arange(len(member.step_starts)) for member in members]))
    values = _float64(value for member in members for value in member.step_values)
    return ids.repeat_interleave(sizes), values.repeat_interleave(sizes)


def _turns(members: Sequence[Trajectory]) -> tuple[Tensor, Tensor | None]:
    """For each drawn token: the number of its turn in time, and what was paid when the turn ended."""
    turns = [
        (number, turn.completion.num_drawn, pay)
        for member in members
        for number, turn, pay in zip(
            member.turn_order or range(len(member.turns)),
            member.turns,
            member.turn_rewards or [turn.reward for turn in member.turns],
            strict=True,
        )
    ]
    sizes = torch.tensor([size for _, size, _ in turns], dtype=torch.int64)
    ids_N = torch.tensor([number for number, _, _ in turns], dtype=torch.int64).repeat_interleave(sizes)
    if all(pay is None for _, _, pay in turns):
        return ids_N, None
    rewards_N, has_tokens = torch.zeros(len(ids_N), dtype=torch.float64), sizes > 0
    rewards_N[(sizes.cumsum(0) - 1)[has_tokens]] = _float64(pay or 0.0 for _, _, pay in turns)[has_tokens]
    return ids_N, rewards_N


def _turn_states(members: Sequence[Trajectory]) -> Tensor:
    """For each drawn token: a number of the state in which its turn began."""
    turns = [turn for member in members for turn in member.turns]
    states = torch.tensor([_turn_state(turn) for turn in turns], dtype=torch.int64)
    return states.repeat_interleave(torch.tensor([turn.completion.num_drawn for turn in turns], dtype=torch.int64))


def _turn_state(turn: Turn) -> int:
    """By the name that the environment gave it; else by what the model saw."""
    if turn.state is not None:
        return _hash(f"state {turn.state}")
    return _digest(np.array(turn.completion.prompt_ids, np.int64).tobytes())


def _key(seed: int, version: int, member: Trajectory) -> int:
    """Key of a member for random draws: the same whatever else is in the batch."""
    return _hash(f"{seed}/{version}/{member.group_id}/{member.index}")


def _hash(text: str) -> int:
    return _digest(text.encode(errors="surrogatepass"))


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest())


def _update_of_groups(groups: Sequence[Group], rules: CreditRules, version: int, epoch: int) -> Tensor:
    """Which optimiser step of an epoch trains each group, as even as possible.

    Consecutive groups in the first; then in an order by a hash, which nothing but seed, step, epoch and group changes.
    """
    update_of_place = torch.arange(len(groups)) * rules.updates // max(1, len(groups))
    if epoch == 0:
        return update_of_place
    keys = [_hash(f"{rules.seed}/{version}/epoch {epoch}/{group.id}") for group in groups]
    return update_of_place[torch.tensor(keys, dtype=torch.int64).argsort().argsort()]


def _weights(credit: Credit, update_B: Tensor, is_kept_B: Tensor, rules: CreditRules) -> tuple[Tensor, Tensor]:
    """Weight of each token of a trajectory, 0 for trajectories that are not trained; and its slope (Sloped).

    Each update is a batch of its own: a trajectory that it does not train has length 0 there and counts nowhere.
    """
    weighting = rules.objective.weighting
    assert weighting is not None, f"objective {rules.objective.name} weighs no tokens"
    weights_B, slopes_B = torch.zeros_like(credit.rewards), torch.zeros_like(credit.rewards)
    for update in range(rules.updates):
        lengths_B = credit.lengths * (is_kept_B & (update_B == update))
        extent = Extent(
            lengths=lengths_B,
            group_ids=credit.group_ids,
            max_new_tokens=rules.max_new_tokens,
            scales=credit.scales,
        )
        weights_B += weighting(extent)
        slopes_B += weighting.run.slopes(extent) if isinstance(weighting.run, SlopedWeighting) else 0.0
    return weights_B, slopes_B


def _filled(
    member_rows: Sequence[Sequence[Sample]],
    advantages_N: Tensor,
    targets_N: Tensor | None,
    weights_B: Tensor,
    slopes_B: Tensor,
) -> list[Sample]:
    """All rows in order, with credit on their drawn tokens and zeros elsewhere."""
    rows = [row for own in member_rows for row in own]
    if not rows:
        return []
    columns = _spreader(rows)
    targets = [None] * len(rows) if targets_N is None else columns(targets_N)
    weights, slopes = _by_row(member_rows, rows, weights_B, slopes_B)
    given = (columns(advantages_N), columns(weights), targets, slopes)
    return [
        dataclasses.replace(
            row,
            advantages=advantage,
            weights=weight,
            targets=target,
            weight_slope=slope,
            # Credit read it over the whole vocabulary; for a ratio within keep-sets the trainer computes it anew.
            proximal_logprobs=row.proximal_logprobs if row.keep_ids is None else None,
        )
        for row, advantage, weight, target, slope in zip(rows, *given, strict=True)
    ]


def _weighed_anew(
    member_rows: Sequence[Sequence[Sample]], rows: Sequence[Sample], weights_B: Tensor, slopes_B: Tensor
) -> list[Sample]:
    """Rows that have their credit, with the weights of another epoch; all other columns are shared, not copied."""
    if not rows:
        return []
    weights_N, slopes = _by_row(member_rows, rows, weights_B, slopes_B)
    given = zip(rows, _spreader(rows)(weights_N), slopes, strict=True)
    return [dataclasses.replace(row, weights=weight, weight_slope=slope) for row, weight, slope in given]


def _by_row(
    member_rows: Sequence[Sequence[Sample]], rows: Sequence[Sample], weights_B: Tensor, slopes_B: Tensor
) -> tuple[Tensor, list[float]]:
    """The weight of each drawn token, and the slope of each row."""
    counts_B = torch.tensor([len(own) for own in member_rows], dtype=torch.int64)
    sizes = torch.tensor([row.num_actions for row in rows], dtype=torch.int64)
    weights_N = weights_B.repeat_interleave(counts_B).repeat_interleave(sizes)
    return weights_N, slopes_B.repeat_interleave(counts_B).tolist()


def _spreader(rows: Sequence[Sample]) -> Callable[[Tensor], list[Sequence[float]]]:
    """What puts one number per drawn token of all rows at its place: a column for each row, zeros elsewhere."""
    # In one piece: a step has millions of tokens.
    is_drawn_T = torch.from_numpy(np.concatenate([array_of(row.loss_mask, np.bool_) for row in rows]))
    ends = np.cumsum([len(row.token_ids) for row in rows])

    def columns(values_N: Tensor) -> list[Sequence[float]]:
        values_T = torch.zeros(len(is_drawn_T), dtype=torch.float64).masked_scatter_(is_drawn_T, values_N).numpy()
        return [Column(part) for part in np.split(values_T, ends[:-1])]

    return columns
