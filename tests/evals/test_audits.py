"""What is put aside for people to read."""

from __future__ import annotations

import dataclasses

from temper.evals.audits import AUDITS, MAX_CHARACTERS, HeldOutAttempt, choose, list_effects, shorten, transcript
from temper.types import Event, EventKind, Message, Score, Task, Trajectory


def attempt(number: int, reward: Score, heldout: float = 0.0, text: str = "") -> HeldOutAttempt:
    task = Task(id=f"t{number}", messages=(Message(role="user", content=f"question {number}"),))
    trajectory = dataclasses.replace(Trajectory.saying(task.id, text or f"answer {number}"), score=reward)
    return HeldOutAttempt(task=task, trajectory=trajectory, heldout=Score.of(heldout))


def test_the_highest_rewards_come_first_and_ties_keep_their_order() -> None:
    attempts = [attempt(i, Score.of(float(i % 3))) for i in range(30)]
    records = choose(attempts, evaluation="greedy", stage=1, step=5, count=12)
    top = [record for record in records if record.kind == "top"]
    assert [record.task_id for record in top] == [f"t{i}" for i in (*range(2, 30, 3), 1, 4)]
    assert [record.place for record in top] == list(range(12))
    assert (top[0].reward, top[0].heldout, top[0].text, top[0].prompt[0].content) == (
        2.0,
        0.0,
        "answer 2",
        "question 2",
    )
    assert {(record.stage, record.step, record.evaluation) for record in records} == {(1, 5, "greedy")}


def test_random_ones_are_seeded_different_each_time_and_not_chosen_by_reward() -> None:
    attempts = [attempt(i, Score.of(float(i))) for i in range(200)]

    def drawn(step: int, seen: list[HeldOutAttempt] = attempts) -> list[str]:
        records = choose(seen, evaluation="greedy", stage=0, step=step)
        return [record.task_id for record in records if record.kind == "random"]

    assert drawn(1) == drawn(1) != drawn(2)
    assert len(set(drawn(1))) == AUDITS
    others = [
        dataclasses.replace(one, trajectory=dataclasses.replace(one.trajectory, score=Score.of(0.0)))
        for one in attempts
    ]
    assert drawn(1, others) == drawn(1), "rewards have no say"


def test_attempts_without_a_reward_can_be_drawn_and_are_never_the_top() -> None:
    records = choose([attempt(0, Score.error("crashed")), attempt(1, Score.of(-1.0))], evaluation="a", stage=0, step=0)
    assert [(r.kind, r.task_id, r.reward) for r in records if r.kind == "top"] == [("top", "t1", -1.0)]
    assert {(r.task_id, r.reward) for r in records if r.kind == "random"} == {("t0", None), ("t1", -1.0)}
    assert choose([], evaluation="a", stage=0, step=0) == []


def test_long_texts_keep_both_ends_and_what_is_kept_is_bounded() -> None:
    text = "begin " + "x" * 10**6 + " end"
    (record, *_) = choose([attempt(0, Score.of(1.0), text=text)], evaluation="a", stage=0, step=0)
    assert record.text.startswith("begin")
    assert record.text.endswith("end")
    assert f"[{len(text) - MAX_CHARACTERS} characters left out]" in record.text
    assert len(record.text) < MAX_CHARACTERS + 100
    assert shorten("y" * MAX_CHARACTERS) == "y" * MAX_CHARACTERS


def test_a_conversation_is_shown_with_its_roles_and_markup_stays_as_it_was() -> None:
    single = Trajectory.saying("t", "<script>alert(1)</script>")
    assert transcript(single) == "<script>alert(1)</script>"
    tool = dataclasses.replace(single.turns[0], replies=(Message(role="tool", content="3"),))
    both = dataclasses.replace(single, turns=(tool, *Trajectory.saying("t", "It is 3.").turns))
    assert transcript(both) == "[assistant]\n<script>alert(1)</script>\n\n[tool]\n3\n\n[assistant]\nIt is 3."


def test_all_that_attempts_did_to_the_world_is_listed_with_its_place_and_nothing_else() -> None:
    events = [Event(kind=kind, name=kind.value) for kind in (EventKind.TOOL_CALL, EventKind.SIDE_EFFECT)]
    lost = Event(kind=EventKind.DENIED, name="denied", detail="attempt 1, which failed: pay()")
    attempts = [attempt(number, Score.of(1.0)) for number in range(3)]
    (turn,) = attempts[1].trajectory.turns
    done = dataclasses.replace(
        attempts[1].trajectory, index=4, turns=(turn, dataclasses.replace(turn, events=tuple(events))),
        unplaced_events=(lost,),
    )  # fmt: skip
    attempts[1] = dataclasses.replace(attempts[1], trajectory=done)
    found = list_effects(attempts, evaluation="greedy", stage=1, step=5)
    assert [(one.place, one.task_id, one.member, one.turn, one.name, one.detail) for one in found] == [
        (0, "t1", 4, 1, "side_effect", ""),
        (1, "t1", 4, None, "denied", lost.detail),
    ]
    assert {(one.stage, one.step, one.evaluation) for one in found} == {(1, 5, "greedy")}
