from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from temper.rewards.form.text import TextReward, edit_distance
from temper.types import Score, Task, Trajectory

Say = Callable[[str], Trajectory]


def task(answer: str | None) -> Task:
    return Task(id="t:1", messages=(), answer=answer)


def slow_edit_distance(left: str, right: str) -> int:
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        before, row = row, [i]
        for j, b in enumerate(right, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (a != b)))
    return row[-1]


@given(st.text(alphabet="abc", max_size=12), st.text(alphabet="abc", max_size=12))
def test_edit_distance_equals_the_textbook_table(left: str, right: str) -> None:
    assert edit_distance(left, right) == slow_edit_distance(left, right)


@pytest.mark.parametrize(
    ("kind", "response", "answer", "value"),
    [
        ("exact", " olleh\n", "olleh", 1.0),
        ("exact", "Olleh", "olleh", 0.0),
        ("contains", "it is olleh!", "olleh", 1.0),
        ("contains", "it is ole", "olleh", 0.0),
        ("rearranged", "loleh", "hello", 1.0),
        ("rearranged", "helo", "hello", 0.0),
        ("rearranged", "helloo", "hello", 0.0),
        ("edit", "olleh", "olleh", 1.0),
        ("edit", "kitten", "sitting", 1 - 3 / 7),
        ("f1", "The cat sat.", "a cat sat", 1.0),
        ("f1", "cat", "cat sat", 2 / 3),
        ("f1", "cat cat", "cat", 2 / 3),
        ("f1", "dog", "cat", 0.0),
        ("f1", "", "cat", 0.0),
        ("f1", "the", "cat", 0.0),
        ("edit", "", "ab", 0.0),
        ("edit", "abcd", "efgh", 0.0),
    ],
)
def test_text_rewards(say: Say, kind: str, response: str, answer: str, value: float) -> None:
    scored = asyncio.run(TextReward(kind).score(task(answer), say(response)))
    assert scored.value == pytest.approx(value, abs=1e-12)


def test_ignore_case(say: Say) -> None:
    assert asyncio.run(TextReward("exact", ignore_case=True).score(task("olleh"), say("OLLEH"))) == Score.of(1.0)


@pytest.mark.parametrize("answer", [None, "", "  "])
def test_a_task_without_an_answer_is_refused_when_data_is_loaded(answer: str | None) -> None:
    assert TextReward("contains").check(task(answer)) is not None
    assert TextReward("contains").check(task("x")) is None


def test_listing_every_answer_pays_with_precision(say: Say) -> None:
    spam = " ".join(f"answer{number}" for number in range(100))
    assert asyncio.run(TextReward("f1").score(task("answer7"), say(spam))).value == pytest.approx(2 / 101)


@pytest.mark.parametrize("kind", ["exact", "contains"])
def test_a_worked_solution_as_gold_answer_is_refused_by_the_key_that_takes_its_result(kind: str) -> None:
    said = TextReward(kind).check(task("3 + 4 = 7\n7 * 6 = 42\n#### 42"))
    assert said is not None
    assert "'42' alone, set answer_pattern = \"#### (.+)\"" in said
    assert TextReward(kind).check(task("42")) is None
    assert TextReward(kind).check(task("#### 42")) is None  # nothing before it: that is the whole answer
    assert TextReward("edit").check(task("7 * 6 = 42\n#### 42")) is None  # pays for a part
