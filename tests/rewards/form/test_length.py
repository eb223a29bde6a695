from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import pytest

from temper.errors import UserError
from temper.rewards.form.length import LengthReward, within
from temper.types import Score, Task, Trajectory

Say = Callable[[str], Trajectory]


@pytest.mark.parametrize(
    ("count", "value"),
    [(10, 1.0), (20, 1.0), (9, 0.8), (22, 0.6), (25, 0.0), (5, 0.0), (0, 0.0), (10**9, 0.0)],
)
def test_it_falls_in_a_straight_line_outside_the_bounds(count: int, value: float) -> None:
    assert within(count, 10, 20, 5) == pytest.approx(value)


def test_without_a_margin_the_bounds_are_hard() -> None:
    assert [within(count, 2, 3, 0) for count in (1, 2, 3, 4)] == [0.0, 1.0, 1.0, 0.0]


def test_tokens_of_all_turns_count_and_words_do_not(say: Say) -> None:
    one = say("many words but only one token was drawn for them")
    task = Task(id="t:1", messages=())
    assert asyncio.run(LengthReward(high=1).score(task, one)) == Score.of(1.0)
    three = dataclasses.replace(one, turns=one.turns * 3)
    assert asyncio.run(LengthReward(high=1).score(task, three)) == Score.of(0.0)


@pytest.mark.parametrize("options", [{"high": -1}, {"low": 5, "high": 4}, {"high": 5, "margin": -1}])
def test_bounds_that_do_not_fit_are_the_users_mistake(options: dict[str, int]) -> None:
    with pytest.raises(UserError, match="do not fit"):
        LengthReward(**options)
