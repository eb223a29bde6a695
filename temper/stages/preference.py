"""Preferences as a source of batches: pairs and labelled completions from files, or pairs made from rollouts.

Owns: KTO's baseline, which members of a group are compared, wins over opponents. Refuses: the losses
(objectives/losses/pairs.py); the loop, the trainer and the roller are those of RL.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal

import torch

from temper.batching.measure import measure_groups
from temper.batching.rows import rows_of
from temper.batching.samples import ScoreFn
from temper.errors import UserError
from temper.objectives.losses.pairs import implicit_rewards
from temper.objectives.losses.preferences import Pairs
from temper.objectives.losses.unpaired import kto_baseline, mismatched_rows
from temper.objectives.objective import DirectLoss, Objective
from temper.rollout.buffer import StepGroups
from temper.stages.preference_rows import RowRules, labelled_rows, make_row, on_drawn, pair_rows, rows_maker
from temper.stages.reference_cache import References
from temper.stages.sft import MAX_SKIPS, TooLong
from temper.stages.stream import StreamSource, TaskStream
from temper.types import Batch, Group, Sample, Task, Trajectory

Draw = tuple[int, Task]


def pair_batch(draws: Sequence[Draw], rules: RowRules, references: References | None) -> Batch:
    """Pairs of equal share. Without `references` the trainer asks the reference itself, if the loss needs one."""
    pairs = [pair_rows(rules, task) for _, task in draws]
    rows = [
        replace(row, group_id=f"{task.id}#{draw}", weights=on_drawn(row, 1 / len(pairs)))
        for (draw, task), pair in zip(draws, pairs, strict=True)
        for row in pair
    ]
    return _examples(rows if references is None else references.fill(rows), len(draws))


def labelled_batch(draws: Sequence[Draw], rules: RowRules, references: References, score: ScoreFn) -> Batch:
    """Completions of equal share, and on their tokens the batch's baseline: how much likelier than the reference the
    policy of now finds completions after prompts that they do not belong to."""
    members = [(f"{task.id}#{draw}", task, row) for draw, task in draws for row in labelled_rows(rules, task)]
    # Good ones first: neighbours are then of different tasks, also where a task gave one of each.
    members.sort(key=lambda member: -member[2].reward)
    if len(draws) < 2:
        raise UserError("kto compares with completions of other prompts. Use trainer.examples_per_step of 2 or more")
    others = [members[place] for place in mismatched_rows(len(members))]
    strangers = [_mismatched(rules, row, other) for (_, _, row), (_, _, other) in zip(members, others, strict=True)]
    count = len(members)
    filled = references.fill([*(row for _, _, row in members), *strangers])
    baseline = kto_baseline(_sums(score(strangers, "policy")), _sums(_references(filled[count:])))
    rows = [
        replace(row, group_id=name, weights=on_drawn(row, 1 / count), advantages=on_drawn(row, baseline))
        for (name, _, _), row in zip(members, filled[:count], strict=True)
    ]
    return _examples(rows, len(draws))


def _mismatched(rules: RowRules, own: Sample, other: Sample) -> Sample:
    """The prompt of one row and the completion of another, cut where the context ends."""
    prompt, completion = own.token_ids[: own.loss_mask.index(1)], other.token_ids[other.loss_mask.index(1) :]
    return make_row(own.group_id, 2, prompt, completion[: max(1, rules.max_length - len(prompt))], 0.0)


def _sums(columns: Iterable[Sequence[float]]) -> torch.Tensor:
    return torch.tensor([sum(column) for column in columns], dtype=torch.float64)


def _references(rows: Iterable[Sample]) -> list[Sequence[float]]:
    return [row.reference_logprobs or [] for row in rows]


def _examples(rows: Sequence[Sample], num_tasks: int) -> Batch:
    lengths = [row.num_actions for row in rows]
    metrics = {"data/examples": float(num_tasks), "gen/len_mean": statistics.fmean(lengths)}
    return Batch(updates=(tuple(rows),), metrics=metrics)


class Preferences(StreamSource):
    """Implements protocols.BatchSource over a stream of pairs or of labelled completions."""

    def __init__(
        self,
        stream: TaskStream,
        make_batch: Callable[[Sequence[Draw]], Batch],
        *,
        batch_size: int,
        references: References | None = None,
        make_rows: Callable[[Task], object] | None = None,
    ) -> None:
        """`make_rows`: makes the rows of one task; tasks that it raises TooLong for are passed over and counted. None:
        a task that does not fit is an error."""
        super().__init__(stream)
        self._make_batch = make_batch
        self._batch_size, self._references, self._make_rows = batch_size, references, make_rows

    async def start(self) -> None:
        if self._references is not None:
            await asyncio.to_thread(self._references.start)

    async def take(self, step: int) -> Batch:
        draws, dropped = list[Draw](), 0
        while len(draws) < self._batch_size:
            draw, task = self._stream.next()
            try:
                if self._make_rows is not None:
                    self._make_rows(task)
                draws.append((draw, task))
            except TooLong:
                dropped += 1
                if dropped > MAX_SKIPS:
                    raise
        batch = await asyncio.to_thread(self._make_batch, draws)
        if self._make_rows is None:
            return batch
        return replace(batch, metrics={**batch.metrics, "data/too_long": float(dropped)})


def offline_source(
    objective: Objective,
    stream: TaskStream,
    rules: RowRules,
    references: References,
    score: ScoreFn,
    batch_size: int,
    *,
    drops_long: bool = False,
) -> Preferences:
    """The source of a preference objective that reads a data set. `score` is the trainer's. `drops_long`: tasks longer
    than the rules allow are passed over and counted."""
    assert objective.loss is not None, "a preference stage trains a direct loss"
    if objective.loss.name == "nash_md":
        raise UserError(
            "nash_md compares fresh rollouts of policy and opponent, and the training data brings pairs of its own. "
            "Train on prompts with a [[reward]], or use an objective for pairs, e.g. dpo"
        )
    is_labelled = objective.loss.name == "kto"
    # A reference that moves is asked at every step.
    is_cached = "reference" in objective.needs and objective.reference is None

    def make_batch(draws: Sequence[Draw]) -> Batch:
        if is_labelled:
            return labelled_batch(draws, rules, references if is_cached else References(score), score)
        return pair_batch(draws, rules, references if is_cached else None)

    make_rows = rows_maker(objective, rules) if drops_long else None
    return Preferences(stream, make_batch, batch_size=batch_size, references=references, make_rows=make_rows)


def heldout_rewards(
    direct_loss: DirectLoss, tasks: Sequence[Task], rules: RowRules, references: References, score: ScoreFn
) -> tuple[list[float], list[float]]:
    """Implicit rewards of the chosen and of the rejected side of held-out pairs, by the policy of now."""
    rows = [row for task in tasks for row in pair_rows(rules, task)]
    policy = _sums(score(rows, "policy")).view(-1, 2)
    reference = _sums(_references(references.fill(rows))).view(-1, 2) if "reference" in direct_loss.needs else None
    lengths = torch.tensor([row.num_actions for row in rows]).view(-1, 2)
    pairs = Pairs(
        chosen_logprobs=policy[:, 0],
        rejected_logprobs=policy[:, 1],
        chosen_lengths=lengths[:, 0],
        rejected_lengths=lengths[:, 1],
        weights=torch.zeros(len(tasks)),
        reference_chosen_logprobs=None if reference is None else reference[:, 0],
        reference_rejected_logprobs=None if reference is None else reference[:, 1],
    )
    chosen, rejected = implicit_rewards(direct_loss, pairs)
    return chosen.tolist(), rejected.tolist()


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
