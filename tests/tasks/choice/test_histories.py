"""What is remembered of prompts: worked numbers, failures that count as nothing, states that come back to the bit."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from temper.tasks.choice.histories import Histories, RateRules, extend_history, passes_of
from temper.types import PromptHistory
from tests.fakes.prompts import make_group, make_tasks

TASKS = make_tasks("t", 20).tasks


def test_a_running_rate_is_the_first_groups_and_then_moves_towards_each_newer_one() -> None:
    rules = RateRules(newest=0.25)
    histories = Histories(rules)
    (first,) = histories.update(1, [make_group(TASKS[0], 0, [1.0, 0.0, 1.0, 0.0])])
    assert first == PromptHistory(task_id="t:0", draws=1, attempts=4, passed=2.0, rate=0.5, last_step=1)
    (second,) = histories.update(7, [make_group(TASKS[0], 5, [1.0, 1.0])])
    assert second == PromptHistory(task_id="t:0", draws=2, attempts=6, passed=4.0, rate=0.625, last_step=7)
    assert histories.get("t:0") == second
    assert histories.get("t:1") is None


def test_a_group_without_a_score_is_a_draw_and_no_rate() -> None:
    histories = Histories()
    (broken,) = histories.update(1, [make_group(TASKS[0], 0, [None, None])])
    assert (broken.draws, broken.attempts, broken.rate) == (1, 0, None)
    histories.update(2, [make_group(TASKS[0], 1, [1.0, None])])
    (again,) = histories.update(3, [make_group(TASKS[0], 2, [None, None])])
    assert (again.draws, again.attempts, again.passed, again.rate, again.last_step) == (3, 1, 1.0, 1.0, 3)


def test_partial_credit_counts_by_its_share_or_by_a_threshold() -> None:
    group = make_group(TASKS[0], 0, [-0.5, 0.25, 0.75, 1.5])
    assert passes_of(group, RateRules()) == [0.0, 0.25, 0.75, 1.0]
    assert passes_of(group, RateRules(pass_score=0.75)) == [0.0, 0.0, 1.0, 1.0]


def test_what_an_opponent_said_is_not_in_the_history_of_the_policy() -> None:
    group = make_group(TASKS[0], 0, [1.0, 0.0])
    (turn,) = group.trajectories[1].turns
    foreign = replace(turn, completion=replace(turn.completion, versions=[-1]))
    mixed = replace(group, trajectories=(group.trajectories[0], replace(group.trajectories[1], turns=(foreign,))))
    assert passes_of(mixed, RateRules()) == [1.0]


@pytest.mark.parametrize("case", range(3))
def test_who_finishes_first_does_not_change_a_history(case: int) -> None:
    chance = random.Random(case)
    groups = [
        make_group(chance.choice(TASKS[:4]), draw, [float(chance.random() < 0.5) for _ in range(3)])
        for draw in range(12)
    ]
    shuffled = chance.sample(groups, len(groups))
    in_order, by_arrival = Histories(), Histories()
    assert in_order.update(1, groups) == by_arrival.update(1, shuffled)
    assert list(in_order) == list(by_arrival)


def test_a_history_is_told_once_a_step_however_often_its_prompt_was_drawn() -> None:
    histories = Histories()
    changed = histories.update(1, [make_group(TASKS[0], draw, [float(draw)]) for draw in (0, 1)])
    assert [(one.draws, one.rate) for one in changed] == [(2, 0.5)]


@pytest.mark.parametrize("case", range(3))
def test_a_state_comes_back_to_the_bit(case: int) -> None:
    chance = random.Random(case)
    histories = Histories(RateRules(newest=chance.random()))
    for step in range(1, 20):
        rewards = [[chance.random() for _ in range(3)], [None]]
        histories.update(
            step, [make_group(chance.choice(TASKS), 2 * step + k, chance.choice(rewards)) for k in range(2)]
        )
    again = Histories()
    again.load_state(histories.state())
    assert list(again) == list(histories)


def test_prompts_of_a_source_without_end_are_measured_and_not_kept() -> None:
    histories = Histories(passing={"stream"})
    endless, bounded = make_tasks("a", 1, "stream").tasks[0], make_tasks("b", 1, "file").tasks[0]
    changed = histories.update(1, [make_group(endless, 0, [1.0]), make_group(bounded, 1, [0.0])])
    assert [one.task_id for one in changed] == ["a:0", "b:0"]
    assert [one.task_id for one in histories] == ["b:0"]


def test_the_oldest_rate_of_all_fades_as_the_rule_says() -> None:
    """The closed form: after n groups of rate r the first counts (1 - newest)^n."""
    rules, history = RateRules(newest=0.3), PromptHistory(task_id="t")
    history = extend_history(history, [1.0], 1, rules)
    for step in range(2, 8):
        history = extend_history(history, [0.0], step, rules)
    assert history.rate == pytest.approx(0.7**6)
