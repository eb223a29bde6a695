from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Iterator

import psutil
import pytest

from temper.errors import UserError
from temper.rewards.math import MathReward
from temper.types import Score, Task, Trajectory

pytest.importorskip("math_verify")
Say = Callable[[str], Trajectory]


def task(answer: str | None) -> Task:
    return Task(id="t:1", messages=(), answer=answer)


@pytest.fixture
def reward() -> Iterator[MathReward]:
    reward = MathReward(workers=1, deadline_seconds=10.0)
    yield reward
    asyncio.run(reward.close())


def score(reward: MathReward, gold: str | None, response: Trajectory) -> Score:
    return asyncio.run(reward.score(task(gold), response))


@pytest.mark.parametrize(
    ("gold", "response", "value"),
    [
        ("72", "so 72", 1.0),
        ("72", "so 73", 0.0),
        ("1,000", r"\boxed{1000}", 1.0),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1.0),
        (r"\boxed{x+1}", r"\boxed{1+x}", 1.0),
        (r"\sqrt{2}", r"\boxed{2}", 0.0),
        (r"\sqrt{2}", r"\boxed{!!}", 0.0),
        ("72", "I do not know.", 0.0),
        ("72", "", 0.0),
    ],
)
def test_right_is_one_and_wrong_or_absent_is_zero(
    reward: MathReward, say: Say, gold: str, response: str, value: float
) -> None:
    assert score(reward, gold, say(response)) == Score.of(value)


def test_a_power_tower_is_an_error_and_the_next_answer_is_scored(say: Say) -> None:
    reward = MathReward(workers=1, deadline_seconds=2.0)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    tower = score(reward, "x+1", say(r"\boxed{9^{9^{9^{9}}} \cdot \sin(9^{9^{9^{9}}})}"))
    right = score(reward, "x+1", say(r"\boxed{1+x}"))
    asyncio.run(reward.close())
    assert tower == Score.error("timeout after 2 s")
    assert right == Score.of(1.0)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_gold_that_cannot_be_parsed_is_found_when_data_is_loaded(reward: MathReward, say: Say) -> None:
    assert reward.check(task("72")) is None
    assert reward.check(task(r"\frac{\pi}{3}")) is None
    assert "cannot be parsed" in (reward.check(task("{")) or "")
    assert "no gold answer" in (reward.check(task(None)) or "")
    assert not score(reward, "{", say(r"\boxed{x}")).is_value
    assert not score(reward, None, say("5")).is_value


def test_plain_numbers_start_no_worker(reward: MathReward, say: Say) -> None:
    before = len(psutil.Process().children())
    assert score(reward, "5", say("5")) == Score.of(1.0)
    assert len(psutil.Process().children()) == before


def test_without_math_verify_the_install_line_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "temper-rl\[math\]"'):
        MathReward()
