from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from temper.errors import UserError
from temper.rewards.form.repetition import RepetitionReward, repeated_share, split_words
from temper.types import Task, Trajectory

Say = Callable[[str], Trajectory]
TASK = Task(id="t:1", messages=())


@pytest.mark.parametrize(
    ("text", "n", "share"),
    [
        ("a b c d", 2, 0.0),
        ("a b a b", 2, 1 / 3),  # ab ba ab
        ("a a a a", 1, 3 / 4),
        ("a b", 4, 0.0),
        ("", 1, 0.0),
    ],
)
def test_the_share_is_counted_by_hand(text: str, n: int, share: float) -> None:
    assert repeated_share(text, n) == pytest.approx(share)


@pytest.mark.parametrize("loop", ["go on and on ", "go,on,and,on,", "Go On AND on ", "说了又说", "go\non\nand\non\n"])
def test_a_loop_is_seen_whatever_separates_its_words(loop: str) -> None:
    assert repeated_share(loop * 20, 4) > 0.8


def test_words_marks_and_letters_without_spaces_stand_alone() -> None:
    assert split_words("Hello, you2! 你好") == ["hello", ",", "you", "2", "!", "你", "好"]


@given(st.text(max_size=60), st.integers(1, 5))
def test_the_share_is_a_share(text: str, n: int) -> None:
    assert 0.0 <= repeated_share(text, n) < 1.0


def test_the_reward_is_a_penalty_or_a_bonus_and_needs_a_response(say: Say) -> None:
    text = say("a b a b")
    assert asyncio.run(RepetitionReward(n=2).score(TASK, text)).value == pytest.approx(-1 / 3)
    assert asyncio.run(RepetitionReward(n=2, is_positive=True).score(TASK, text)).value == pytest.approx(2 / 3)
    for empty in ("  ", "\u200b\u2060"):
        assert asyncio.run(RepetitionReward().score(TASK, say(empty))).value == -1.0
        assert asyncio.run(RepetitionReward(is_positive=True).score(TASK, say(empty))).value == 0.0


def test_an_n_below_one_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="n=0"):
        RepetitionReward(n=0)
