"""A batch of several epochs: every row once in each, fresh minibatches, credit as in one."""

from __future__ import annotations

import dataclasses

import pytest

from temper.batching import CreditRules, assign_credit, rows_of_groups
from temper.objectives import resolve
from temper.types import Status


def rules(**fields) -> CreditRules:
    return CreditRules(objective=resolve(fields.pop("preset", "dapo")), max_new_tokens=8, **fields)


def updates_of(groups, given: CreditRules, version: int = 0):
    return assign_credit(rows_of_groups(groups), groups, given, version=version).updates


def eight_groups(group):
    return [group([(1.0, 1 + draw % 3), (0.0, 2)], draw=draw) for draw in range(8)]


def minibatches(updates) -> list[frozenset[str]]:
    return [frozenset(row.group_id for row in update) for update in updates]


def test_the_first_epoch_is_the_batch_of_one_epoch(group) -> None:
    groups = eight_groups(group)
    once, twice = (updates_of(groups, rules(updates=2, epochs=epochs)) for epochs in (1, 2))
    assert (len(once), len(twice)) == (2, 4)
    assert twice[:2] == once


def test_each_epoch_has_every_row_once_in_whole_groups_and_minibatches_of_its_own(group) -> None:
    groups = eight_groups(group)
    updates = updates_of(groups, rules(updates=4, epochs=4))
    epochs = [updates[start : start + 4] for start in range(0, 16, 4)]
    names = {(row.group_id, row.index) for update in epochs[0] for row in update}
    for epoch in epochs:
        rows = [(row.group_id, row.index) for update in epoch for row in update]
        assert len(rows) == len(set(rows)) == 16
        assert set(rows) == names
        assert [len(update) for update in epoch] == [4] * 4, "two whole groups each"
        assert len(frozenset.union(*minibatches(epoch))) == 8
    assert len({frozenset(minibatches(epoch)) for epoch in epochs}) == 4, "four ways to share eight groups out"


def test_every_update_of_every_epoch_has_its_own_denominator(group) -> None:
    updates = updates_of(eight_groups(group), rules(updates=4, epochs=3))
    assert [sum(sum(row.weights) for row in update) for update in updates] == pytest.approx([1.0] * 12)
    by_group = [{row.group_id: max(row.weights) for update in updates[e : e + 4] for row in update} for e in (0, 4, 8)]
    assert by_group[0] != by_group[1], "who shares an update decides what a token counts"


def test_credit_is_that_of_the_first_epoch_and_not_copied(group) -> None:
    updates = updates_of(eight_groups(group), rules(updates=2, epochs=2))
    first, second = (
        {(row.group_id, row.index): row for update in part for row in update} for part in (updates[:2], updates[2:])
    )
    for name, row in first.items():
        again = second[name]
        assert again == dataclasses.replace(row, weights=again.weights)
        assert again.advantages is row.advantages
        assert again.token_ids is row.token_ids


def test_minibatches_follow_seed_and_step_and_nothing_else(group) -> None:
    groups = eight_groups(group)

    def second(seed: int, version: int, order: int = 1) -> list[frozenset[str]]:
        return minibatches(updates_of(groups[::order], rules(updates=4, epochs=2, seed=seed), version)[4:])

    assert second(1, 5) == second(1, 5) == second(1, 5, order=-1)
    assert second(1, 5) != second(2, 5)
    assert second(1, 5) != second(1, 6)


def test_members_that_are_not_trained_stay_out_of_every_epoch(group) -> None:
    cut = [Status.COMPLETED, Status.TRUNCATED_LENGTH]
    groups = [group([(1.0, 2), (0.0, 3)], draw=draw, statuses=cut) for draw in range(4)]
    updates = updates_of(groups, rules(updates=2, epochs=2, train_truncated=False))
    assert [{row.index for row in update} for update in updates] == [{0}] * 4
