"""Guarantee: only complete, scored attempts are chosen, each text once, by rules that no order of equal scores changes.

Planted faults: an error that is kept, a text that counts twice, a tie that the last one wins.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest

from temper.errors import UserError
from temper.evals.suites import ANSWERS
from temper.rollout import selection
from temper.rollout.selection import (
    Attempt,
    Choice,
    Selection,
    attempt_of,
    choose,
    eligible,
    normalised,
    read_selection,
    select,
)
from temper.types import Completion, Finish, Group, Message, Score, Status, Task, Trajectory, Turn


def member(index: int, text: str, score: Score, status: Status = Status.COMPLETED) -> Trajectory:
    completion = Completion(prompt_ids=(1,), token_ids=[2], logprobs=[-1.0], versions=[3], finish=Finish.STOP)
    turn = Turn(completion=completion, message=Message(role="assistant", content=text))
    return Trajectory(task_id="t", group_id="t#0", index=index, turns=(turn,), status=status, score=score)


def group(*members: Trajectory) -> Group:
    task = Task(id="t", messages=(Message(role="user", content="?"),), answer="4")
    return Group(id="t#0", draw=0, task=task, trajectories=members)


def keep(table: str | dict[str, object]) -> Selection:
    return read_selection(table, ANSWERS)  # type: ignore[arg-type]


MIXED = group(
    member(0, "It is 3.", Score.of(0.0)),
    member(1, "It is 4.", Score.of(1.0)),
    member(2, "It  is\n4.", Score.of(1.0)),
    member(3, "Two and two: 4.", Score.of(1.0)),
    member(4, "crash", Score.error("verifier crashed")),
    member(5, "It is 4, and", Score.of(1.0), Status.TRUNCATED_LENGTH),
    member(6, "Perhaps 5.", Score.of(0.5)),
    member(7, " ", Score.of(1.0)),
    member(8, "unknown", Score.unscorable("nobody knows")),
    member(9, "broken tool", Score.error("tool_error: x"), Status.TOOL_ERROR),
)


def indices(rule: str | dict[str, object]) -> list[int]:
    return [t.index for t in select(keep(rule), MIXED)]


def test_errors_cut_and_empty_responses_are_never_kept() -> None:
    assert [t.index for t in eligible(MIXED)] == [0, 1, 2, 3, 6]
    assert indices({"name": "correct", "threshold": -100.0}) == [0, 1, 3, 6]


def test_each_rule_keeps_what_its_name_says() -> None:
    assert indices("correct") == [1, 3], "2 says what 1 said"
    assert indices({"name": "correct", "cap": 1}) == [1]
    assert indices({"name": "correct", "threshold": 0.5}) == [1, 3, 6]
    assert indices("best") == [1], "of equal scores the first"
    assert indices({"name": "best", "threshold": 2.0}) == []
    assert indices({"name": "top", "k": 3}) == [1, 3, 6], "as texts 1 and 3 differ"
    assert indices({"name": "top", "k": 3, "answer": "math"}) == [1, 6, 0], "both answer 4"
    assert indices({"name": "top", "k": 2, "answer": "math", "cap": 1}) == [1]


def test_a_weighted_sum_a_hair_below_the_threshold_passes() -> None:
    assert choose(keep("correct"), [Attempt(score=0.1 * 3 + 0.7 - 1e-12, said="a", answer=None)]).kept == (0,)


def test_what_states_no_answer_is_told_apart_by_its_text() -> None:
    attempts = [Attempt(score=1.0, said=said, answer=None) for said in ("a", "b")]
    assert choose(keep("top"), [*attempts, Attempt(score=1.0, said="c", answer="a")]).kept == (0, 1)
    assert choose(keep({"name": "top", "k": 9}), [*attempts, Attempt(score=1.0, said="c", answer="a")]).kept == (
        0,
        1,
        2,
    )


def test_normalised_texts_differ_in_more_than_space_and_unicode_form() -> None:
    assert normalised(["a  b\n", "é"]) == normalised([" a b", "e\u0301"])
    assert normalised(["a", "b"]) != normalised(["a b"]), "two turns are not one"
    assert normalised(["A"]) != normalised(["a"])


@pytest.mark.parametrize("rule", ["correct", "best", {"name": "top", "k": 2}, {"name": "correct", "cap": 2}])
def test_choosing_again_among_the_kept_and_new_ones_is_choosing_among_all(rule: str | dict[str, object]) -> None:
    """What the ledger relies on when a prompt is drawn twice. Equal texts have equal scores."""
    numbers, chosen = random.Random(0), keep(rule)
    for _ in range(200):
        scores = {said: numbers.choice([0.0, 0.5, 1.0]) for said in "abcdef"}
        drawn = [
            Attempt(score=scores[said], said=said, answer=numbers.choice("xy" if said < "d" else "z"))
            for said in numbers.choices("abcdef", k=8)
        ]
        first = [drawn[place] for place in sorted(choose(chosen, drawn[:4]).kept)]
        again = [*first, *drawn[4:]]
        both = [[rows[place].said for place in sorted(choose(chosen, rows).kept)] for rows in (again, drawn)]
        if isinstance(rule, dict) and rule["name"] == "top":
            both = [sorted(scores[said] for said in kept) for kept in both]  # type: ignore[misc]
        assert both[0] == both[1]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("corect", "rule 'corect' is unknown. Did you mean \"correct\"?"),
        ({"threshold": 1.0}, "rule None is unknown"),
        ({"name": "top", "n": 2}, 'option "n" is unknown'),
        ({"name": "top", "k": 0}, "k=0 must be at least 1"),
        ({"name": "best", "cap": -1}, "cap=-1 must be a whole number"),
        ({"name": "best", "cap": True}, "cap=True must be a whole number"),
        ({"name": "correct", "threshold": "high"}, "threshold='high' must be of type float"),
        ({"name": "top", "answer": "maths"}, "answer='maths' is unknown. Did you mean \"math\"?"),
    ],
)
def test_mistakes_in_the_recipe_are_named(table: str | dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        keep(table)
    assert message in str(caught.value)


def plant_errors_are_kept(patch: pytest.MonkeyPatch) -> None:
    """The most expensive line: a failure becomes a number."""

    def scored(trajectory: Trajectory) -> Trajectory:
        return trajectory if trajectory.score.is_value else dataclasses.replace(trajectory, score=Score.of(1.0))

    patch.setattr(selection, "eligible", lambda group: tuple(scored(t) for t in group.trajectories))


def plant_duplicates_count_twice(patch: pytest.MonkeyPatch) -> None:
    numbered: Callable[..., Attempt] = attempt_of
    patch.setattr(
        selection,
        "attempt_of",
        lambda t, answer_of: dataclasses.replace(numbered(t, answer_of), said=f"{t.index} {t.text}"),
    )


def plant_the_last_of_equals_wins(patch: pytest.MonkeyPatch) -> None:
    def reversed_choice(chosen: Selection, attempts: list[Attempt]) -> Choice:
        found = choose(chosen, attempts[::-1])
        return Choice(kept=tuple(len(attempts) - 1 - place for place in found.kept), duplicates=())

    patch.setattr(selection, "choose", reversed_choice)


@pytest.mark.parametrize("plant", [plant_errors_are_kept, plant_duplicates_count_twice, plant_the_last_of_equals_wins])
def test_a_planted_fault_is_seen(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test_each_rule_keeps_what_its_name_says()
