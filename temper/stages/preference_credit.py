"""Preferences made of rollouts: which members of a group are compared, and wins over opponents.

Owns: the credit of a step whose groups become pairs. Refuses: the losses, and rolling.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal

from temper.batching.measure import measure_groups
from temper.batching.rows import rows_of
from temper.rollout.buffer import StepGroups
from temper.stages.reading.preference_rows import on_drawn
from temper.types import Batch, Group, Sample, Trajectory

Choose = Literal["extremes", "random", "sides"]
Scored = tuple[Trajectory, float]


def pairs_of(taken: StepGroups, *, version: int, updates: int = 1, choose: Choose = "extremes", seed: int = 0) -> Batch:
    """Credit of a step: of each group the best and the worst member, or two drawn at random, as one pair; or, from both
    sides of groups with opponents, the two whose rewards differ most.

    Groups without a pair, because all rewards or both texts are equal, are dropped with the reason. `version` is that
    of the weights that will be trained.
    """
    kept, dropped = [], list(taken.dropped)
    for group in sorted(taken.groups, key=lambda group: group.draw):
        pair = _CHOICES[choose](group, seed)
        reason = _why_no_pair(pair)
        if pair is None or reason is not None:
            dropped.append((group, _ONE_SIDED if pair is None and choose == "sides" else reason or "no pair"))
            continue
        sides = zip(pair, (1.0, 0.0), strict=True)
        kept.append((group, [replace(row, reward=reward) for side, reward in sides for row in rows_of(side)]))
    return _rolled(kept, dropped, version, _updates([(rows, 1) for _, rows in kept], updates))


def wins_of(taken: StepGroups, *, version: int, updates: int = 1) -> Batch:
    """Credit of a step under nash_md: the policy's members, each with the share of its opponents that it beats, ties
    half. Opponents are not trained: a policy gradient on what another distribution drew would be biased."""
    kept, shares, dropped = [], [], list(taken.dropped)
    for group in sorted(taken.groups, key=lambda group: group.draw):
        wins = _wins(group)
        if not wins:
            dropped.append((group, _ONE_SIDED))
            continue
        rows = [replace(row, advantages=on_drawn(row, win)) for member, win in wins for row in rows_of(member)]
        kept.append((group, rows))
        shares.append((rows, len(wins)))
    return _rolled(kept, dropped, version, _updates(shares, updates))


_ONE_SIDED = "no scored member of the policy, or none of its opponent"


def _sides(group: Group) -> tuple[list[Scored], list[Scored]]:
    """Scored members of the policy, and of its opponent."""
    members = list(zip(group.trainable, group.rewards, strict=True))
    return [m for m in members if not m[0].is_opponents], [m for m in members if m[0].is_opponents]


def _wins(group: Group) -> list[Scored]:
    """The policy's members, each with the share of opponents it beats; none without an opponent."""
    own, opponents = _sides(group)
    if not opponents:
        return []
    rivals = [reward for _, reward in opponents]
    return [
        (member, statistics.fmean((reward > rival) + 0.5 * (reward == rival) for rival in rivals))
        for member, reward in own
    ]


def _best(members: Iterable[Scored]) -> Scored:
    """The first of them, as below."""
    return max(members, key=lambda member: member[1])


def _worst(members: Iterable[Scored]) -> Scored:
    return min(members, key=lambda member: member[1])


def _extremes(group: Group, seed: int) -> tuple[Trajectory, Trajectory] | None:
    """The first of the best and the first of the worst."""
    members = list(zip(group.trainable, group.rewards, strict=True))
    return (_best(members)[0], _worst(members)[0]) if len(members) > 1 else None


def _across(group: Group, seed: int) -> tuple[Trajectory, Trajectory] | None:
    """One of the policy and one of its opponent, the better one first: those whose rewards differ most."""
    own, opponents = _sides(group)
    if not own or not opponents:
        return None
    pairs = (_best(own), _worst(opponents)), (_best(opponents), _worst(own))
    better, worse = max(pairs, key=lambda pair: pair[0][1] - pair[1][1])
    return better[0], worse[0]


def _two_at_random(group: Group, seed: int) -> tuple[Trajectory, Trajectory] | None:
    """Two members, the better one first; the same after a resume."""
    members = list(zip(group.trainable, group.rewards, strict=True))
    if len(members) < 2:
        return None
    two = random.Random(f"{seed}/{group.id}").sample(members, 2)
    better, worse = sorted(two, key=lambda pair: -pair[1])
    return better[0], worse[0]


_CHOICES: dict[Choose, Callable[[Group, int], tuple[Trajectory, Trajectory] | None]] = {
    "extremes": _extremes,
    "random": _two_at_random,
    "sides": _across,
}


def _why_no_pair(pair: tuple[Trajectory, Trajectory] | None) -> str | None:
    if pair is None:
        return "fewer than two scored members"
    better, worse = (side.score.value for side in pair)
    assert better is not None, "only scored members are compared"
    assert worse is not None, "only scored members are compared"
    if better - worse <= 1e-8 * max(1.0, abs(better), abs(worse)):
        return "equal rewards"
    drawn = [[turn.completion.token_ids for turn in side.turns] for side in pair]
    return "both sides say the same" if drawn[0] == drawn[1] else None


def _updates(shares: Sequence[tuple[list[Sample], int]], updates: int) -> tuple[tuple[Sample, ...], ...]:
    """Optimiser steps of consecutive groups, each a batch with its own denominator: the sum of its groups' counts."""
    parts: list[list[tuple[list[Sample], int]]] = [[] for _ in range(updates)]
    for place, share in enumerate(shares):
        parts[place * updates // len(shares)].append(share)
    weights = [1 / max(1, sum(count for _, count in part)) for part in parts]
    return tuple(
        tuple(replace(row, weights=on_drawn(row, weight)) for rows, _ in part for row in rows)
        for part, weight in zip(parts, weights, strict=True)
        if part
    )


def _rolled(
    kept: Sequence[tuple[Group, list[Sample]]],
    dropped: Sequence[tuple[Group, str]],
    version: int,
    updates: tuple[tuple[Sample, ...], ...],
) -> Batch:
    groups = tuple(group for group, _ in kept)
    return Batch(updates=updates, groups=groups, dropped=tuple(dropped), metrics=_measured(groups, dropped, version))


def _measured(groups: Sequence[Group], dropped: Sequence[tuple[Group, str]], version: int) -> dict[str, float]:
    """data/... is of whole groups, whose members are compared. All else is of the policy's members: an opponent's
    rewards, lengths and age say nothing about it."""
    whole = measure_groups(groups, dropped, version)
    generated = [*groups, *(group for group, _ in dropped)]
    if not any(member.is_opponents for group in generated for member in group.trajectories):
        return whole
    own = measure_groups([_own(group) for group in groups], [(_own(group), why) for group, why in dropped], version)
    wins = [win for group in generated for _, win in _wins(group)]
    compared = {"preference/win_rate": statistics.fmean(wins)} if wins else {}
    return own | {name: value for name, value in whole.items() if name.startswith("data/")} | compared


def _own(group: Group) -> Group:
    return replace(group, trajectories=tuple(t for t in group.trajectories if not t.is_opponents))
