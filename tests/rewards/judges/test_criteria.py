from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from temper.errors import UserError
from temper.rewards.judges.criteria import Item, RubricReward, combine_items, read_items, rubric_score
from temper.types import Message, Score, ScoreKind, Task, Trajectory

Say = Callable[[str], Trajectory]
QUESTION = (Message(role="user", content="Explain."),)


def task(rubric: object = None) -> Task:
    return Task(id="t:1", messages=QUESTION, extra={} if rubric is None else {"rubric": json.dumps(rubric)})


def test_the_rubric_score_worked_by_hand() -> None:
    # (2 * 1 + 1 * 0.5 - 1 * 0.25) / (2 + 1 + 1)
    assert rubric_score([2.0, 1.0, -1.0], [1.0, 0.5, 0.25]) == 0.5625
    assert rubric_score([-1.0], [1.0]) == -1.0


def test_each_item_is_judged_by_itself_and_logged(server: Any, say: Say) -> None:
    marks = {"is right": 10, "is short": 5, "insults": 0}
    server.answer = lambda texts: {"score": marks[texts["criterion"]]}
    reward = RubricReward(**server.options(items=["is right", "is short", "insults"], weights=[2.0, 1.0, -1.0]))
    assert asyncio.run(reward.score(task(), say("yes"))) == Score.of(2.5 / 4)
    *items, total = reward.log.take()
    assert {record["criterion"]: (record["weight"], record["value"]) for record in items} == {
        "is right": (2.0, 1.0), "is short": (1.0, 0.5), "insults": (-1.0, 0.0),
    }  # fmt: skip
    assert total["value"] == 2.5 / 4
    assert {record["fingerprint"] for record in (*items, total)} == {reward.fingerprint}


def test_the_rubric_of_the_task_goes_before_that_of_the_recipe(server: Any, say: Say) -> None:
    asked = []
    server.answer = lambda texts: asked.append(texts["criterion"]) or {"score": 10}
    reward = RubricReward(**server.options(items=["from the recipe"]))
    asyncio.run(reward.score(task(["from the task"]), say("yes")))
    asyncio.run(reward.score(task(), say("yes")))
    assert asked == ["from the task", "from the recipe"]


def test_one_item_without_a_verdict_leaves_no_score(server: Any, say: Say) -> None:
    """Planted fault: the mean of the rest would be 1 here."""
    server.answer = lambda texts: {"score": 10} if texts["criterion"] == "easy" else {"score": "hm"}
    reward = RubricReward(**server.options(items=["easy", "hard"]))
    score = asyncio.run(reward.score(task(), say("yes")))
    assert score.kind is ScoreKind.UNSCORABLE
    assert "hard" in (score.reason or "")
    server.answer = lambda texts: {"score": 10} if texts["criterion"] == "easy" else None
    assert asyncio.run(reward.score(task(), say("yes"))).kind is ScoreKind.ERROR


def test_an_error_is_not_hidden_by_an_unscorable_item() -> None:
    scores = [Score.unscorable("mute"), Score.error("broken"), Score.of(1.0)]
    assert combine_items([Item("a"), Item("b"), Item("c")], scores).kind is ScoreKind.ERROR


def test_rubrics_are_read_from_json() -> None:
    assert read_items('["a", {"criterion": " b ", "weight": -2}]') == (Item("a", 1.0), Item("b", -2.0))


@pytest.mark.parametrize(
    "rubric", [[], {"criterion": "a"}, [1], [{"weight": 1}], [{"criterion": "a", "weight": 0}], [""],
               [{"criterion": "a", "weight": True}], [{"criterion": "a", "wieght": 2}]]
)  # fmt: skip
def test_a_malformed_rubric_is_found_when_data_is_loaded(server: Any, say: Say, rubric: object) -> None:
    reward = RubricReward(**server.options(items=["of the recipe"]))
    assert reward.check(task(rubric)) is not None
    assert asyncio.run(reward.score(task(rubric), say("x"))).kind is ScoreKind.ERROR


def test_a_rubric_must_come_from_somewhere(server: Any) -> None:
    assert "has no rubric" in (RubricReward(**server.options()).check(task()) or "")
    assert RubricReward(**server.options()).check(task(["a"])) is None


@pytest.mark.parametrize(
    "wrong", [{"items": ["a"], "weights": [1.0, 2.0]}, {"items": "abc"}, {"items": ["a"], "weights": [0]}]
)
def test_options_that_make_no_rubric_are_refused(server: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="rubric"):
        RubricReward(**server.options(**wrong))
