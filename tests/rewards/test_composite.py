"""Guarantee: a verifier that fails in any way is an error with its reason, counted, and never a number."""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import psutil
import pytest

from temper.catalogue import reward_of
from temper.config import RewardConfig
from temper.errors import UserError
from temper.protocols import Reward
from temper.rewards.composite import CompositeReward, Part
from temper.rewards.form.text import TextReward
from temper.rewards.user import UserReward
from temper.types import Group, Message, Score, ScoreKind, Task, Trajectory

TASK = Task(id="train.jsonl:3", messages=(Message(role="user", content="p"),), answer="right")
Say = Callable[[str], Trajectory]
WELL = Score.of(0.9)


class Broken(Reward):
    """A reward whose own code is wrong, and whose number is none."""

    name = "broken"

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        if trajectory.text == "nan":
            return Score.of(float("nan"))
        raise KeyError("missing column")

    def check(self, task: Task) -> str | None:
        return "it is broken"


def test_every_failure_is_excluded_counted_by_reason_and_leaves_no_process(misbehaving: str, say: Say) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    rubric = CompositeReward([(UserReward(f"{misbehaving}:reward", workers=2, deadline_seconds=1.0), 1.0)])
    poisons = ["raise", "sleep", "spin", "bomb", "tower", "crash", "text", "nan"]

    async def go() -> list[Score]:
        responses = [text for poison in poisons for text in (poison, "right", "wrong")]
        scored = await asyncio.gather(*(rubric.score(TASK, say(text)) for text in responses))
        await rubric.close()
        return [total for total, _ in scored]

    scores = asyncio.run(go())
    failures = scores[::3]
    assert all(score.kind is ScoreKind.ERROR and score.value is None for score in failures)
    # Each names the line: of the function, or where it raised.
    assert all(re.search(rf", in .*{misbehaving}\.py, line \d+$", str(score.reason)) for score in failures)
    assert Counter(str(score.reason).partition(", in ")[0] for score in failures) == {
        "reward: ValueError: verifier bug": 1,
        "reward: timeout after 1 s": 4,
        "reward: worker died (exit code 3)": 1,
        "reward: the function returned 'good', not a number or None": 1,
        "reward: the reward is nan": 1,
    }
    assert {score.value for score in scores[1::3]} == {1.0}
    assert {score.value for score in scores[2::3]} == {0.0}
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_a_reward_whose_own_code_raises_is_an_error(say: Say) -> None:
    rubric = CompositeReward([(TextReward("exact"), 1.0), (Broken(), 1.0)])
    for text, reason in (("right", "broken: KeyError: 'missing column'"), ("nan", "broken: the reward is nan")):
        total, parts = asyncio.run(rubric.score(TASK, say(text)))
        assert total == Score.error(reason)
        assert parts["exact"].is_value


def test_parts_are_kept_before_weighting_and_told_apart(say: Say) -> None:
    rubric = CompositeReward([(TextReward("exact"), 2.0), (TextReward("exact", ignore_case=True), 0.5)])
    total, parts = asyncio.run(rubric.score(TASK, say("RIGHT")))
    assert total == Score.of(0.5)
    assert parts == {"exact": Score.of(0.0), "exact_2": Score.of(1.0)}


def test_check_names_the_reward_and_the_task() -> None:
    assert CompositeReward([(TextReward("exact"), 1.0)]).check(TASK) is None
    reason = CompositeReward([(Broken(), 1.0)]).check(TASK)
    assert reason == 'reward "broken" cannot score task train.jsonl:3: it is broken'


def test_a_gate_is_applied_and_every_part_is_still_logged_before_and_after(say: Say) -> None:
    gated = CompositeReward(
        [Part(TextReward("exact"), is_gate=True), (TextReward("contains"), 2.0), (TextReward("edit"), 0.5)]
    )
    assert gated.weights == {"exact": 0.0, "contains": 2.0, "edit": 0.5}
    total, parts = asyncio.run(gated.score(TASK, say("right!!!!!")))
    assert total == Score.of(0.0)
    assert parts == {"exact": Score.of(0.0), "contains": Score.of(1.0), "edit": Score.of(0.5)}
    assert set(gated.weighted(parts).values()) == {Score.of(0.0)}
    total, parts = asyncio.run(gated.score(TASK, say("right")))
    assert total == Score.of(2.5)
    assert gated.weighted(parts) == {"exact": Score.of(0.0), "contains": Score.of(2.0), "edit": Score.of(0.5)}


def test_bounds_are_applied_before_the_weight(say: Say) -> None:
    bounded = CompositeReward([Part(TextReward("exact"), 10.0, clip=(0.0, 0.25))])
    total, parts = asyncio.run(bounded.score(TASK, say("right")))
    assert (total, parts) == (Score.of(2.5), {"exact": Score.of(1.0)})


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Part(TextReward("exact"), is_gate=True), "every part of the reward is a gate"),
        (Part(TextReward("exact"), clip=(1.0, 0.0)), "low <= high"),
        (Part(TextReward("exact"), float("nan")), "finite"),
        (Part(TextReward("exact"), is_gate=True, clip=(0.0, 1.0)), "no bounds"),
    ],
)
def test_rules_that_do_not_fit_are_the_users_mistake(part: Part, message: str) -> None:
    with pytest.raises(UserError, match=message):
        CompositeReward([part])


class Remembering(Reward):
    """A judge of fixed wording that learns and keeps a log."""

    name = "remembering"
    learns = True

    def __init__(self, fingerprint: str = "abc") -> None:
        self.fingerprint = fingerprint
        self.seen: list[str] = []

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        return Score.of(1.0)

    async def start(self) -> dict[str, float]:
        return {"kappa": 0.8}

    async def evolve(self, group: Group) -> None:
        self.seen.append(group.id)

    def state(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.seen = list(state["seen"])


def test_parts_that_learn_are_shown_groups_and_come_back_as_they_were() -> None:
    part = Remembering()
    rubric = CompositeReward([(part, 1.0)])
    groups = [Group(id=name, draw=0, task=Task(id="t", messages=()), trajectories=()) for name in "ab"]
    asyncio.run(rubric.evolve(groups))
    assert part.seen == ["a", "b"]
    other = Remembering()
    CompositeReward([(other, 1.0)]).load_state(rubric.state())
    assert other.seen == ["a", "b"]
    assert asyncio.run(rubric.start()) == {"remembering/kappa": 0.8}


def test_a_judge_that_is_asked_otherwise_after_a_resume_is_refused() -> None:
    state = CompositeReward([(Remembering("abc"), 1.0)]).state()
    with pytest.raises(UserError, match='reward "remembering" was abc when this run began and is xyz now'):
        CompositeReward([(Remembering("xyz"), 1.0)]).load_state(state)


class Paying(Reward):
    """Pays turns what it is told; counts how often it is asked."""

    name = "paying"
    pays_turns = True

    def __init__(self, turns: Sequence[float | None], score: Score = WELL) -> None:
        self.turns = turns
        self.verdict = score
        self.asked = 0

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        raise AssertionError("a judge would be paid twice")

    async def score_turns(self, task: Task, trajectory: Trajectory) -> tuple[Score, Sequence[float | None]]:
        self.asked += 1
        return self.verdict, self.turns


def test_a_part_that_pays_turns_is_asked_once_and_its_weight_scales_what_it_pays(say: Say) -> None:
    part = Paying([0.4])
    rubric = CompositeReward([(TextReward("exact"), 1.0), (part, 0.5)])
    assert rubric.pays_turns
    assert rubric.weights == {"exact": 1.0, "paying": 0.0}
    total, parts, turns = asyncio.run(rubric.score_turns(TASK, say("right")))
    assert (total, parts["paying"], turns) == (Score.of(1.0), WELL, [1.2])
    assert rubric.weighted(parts)["paying"] == Score.of(0.0)
    assert asyncio.run(rubric.score(TASK, say("wrong")))[0] == Score.of(0.0)
    assert part.asked == 2, "once for each response"


@pytest.mark.parametrize(
    ("turns", "score", "kind"),
    [
        ([0.1], Score.unscorable("silent"), ScoreKind.UNSCORABLE),
        ([], Score.error("down"), ScoreKind.ERROR),
        ([0.1, 0.2], WELL, ScoreKind.ERROR),
        ([math.nan], WELL, ScoreKind.ERROR),
    ],
)
def test_payments_that_failed_or_do_not_fit_are_never_numbers(
    turns: list[float], score: Score, kind: ScoreKind, say: Say
) -> None:
    rubric = CompositeReward([(TextReward("exact"), 1.0), (Paying(turns, score), 0.5)])
    total, _, paid = asyncio.run(rubric.score_turns(TASK, say("right")))
    assert (total.kind, paid) == (kind, [])


def test_a_rubric_that_pays_no_turns_says_so(say: Say) -> None:
    rubric = CompositeReward([(TextReward("exact"), 1.0)])
    assert not rubric.pays_turns
    assert asyncio.run(rubric.score_turns(TASK, say("right")))[2] == []


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([(Paying([]), 1.0)], "Add the outcome"),
        ([(TextReward("exact"), 1.0), (Paying([]), 1.5)], "good steps could pay more than being right"),
        ([(TextReward("exact"), 1.0), Part(Paying([]), is_gate=True)], "neither a gate nor clipped"),
        ([(TextReward("exact"), 1.0), Part(Paying([]), clip=(0.0, 1.0))], "neither a gate nor clipped"),
    ],
)
def test_payments_beside_no_outcome_or_above_it_are_the_users_mistake(parts: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        CompositeReward(parts)


def test_only_a_part_that_adds_can_be_optional() -> None:
    with pytest.raises(UserError, match="only a part that adds"):
        CompositeReward([Part(TextReward("exact"), is_gate=True, is_optional=True), (TextReward("f1"), 1.0)])


def test_a_recipe_says_whether_a_part_is_optional(say: Say) -> None:
    task = Task(id="t:1", messages=(Message(role="user", content="1 + 1 = ?"),), answer="2")  # in no language

    def whole(is_optional: bool) -> Score:
        parts = [RewardConfig(kind="exact"), RewardConfig(kind="language", optional=is_optional)]
        total, _ = asyncio.run(reward_of(parts).score(task, say("2")))
        return total

    assert whole(True) == Score.of(1.0)
    assert whole(False).kind is ScoreKind.UNSCORABLE


def test_a_source_is_judged_by_the_parts_it_names(say: Say) -> None:
    parts = [Part(TextReward("exact"), name="strict"), Part(TextReward("contains"), 0.5), Part(Broken(), 1.0)]
    rubric = CompositeReward(parts, {"a": ["strict", "contains"], "b": ["contains"]})

    def scored(source: str, text: str) -> tuple[Score, dict[str, Score]]:
        return asyncio.run(rubric.score(replace(TASK, source=source), say(text)))

    total, found = scored("a", "right")
    assert (total.value, list(found)) == (1.5, ["strict", "contains"])
    assert {name: one.value for name, one in rubric.weighted(found).items()} == {"strict": 1.0, "contains": 0.5}
    total, found = scored("b", "all right")
    assert (total.value, list(found)) == (0.5, ["contains"])
    assert scored("other", "right")[0].kind is ScoreKind.ERROR, "who is not named is judged by all"
    assert rubric.check(replace(TASK, source="a")) is None
    assert "it is broken" in str(rubric.check(TASK))


def test_a_source_must_be_judged_by_a_part_that_adds() -> None:
    parts = [Part(TextReward("exact")), Part(TextReward("contains"), is_gate=True)]
    CompositeReward(parts, {"a": ["exact"]})
    with pytest.raises(UserError, match="every part of the reward is a gate"):
        CompositeReward(parts, {"a": ["contains"]})


def test_a_part_learns_from_the_sources_that_it_judges() -> None:
    seen: list[str] = []

    class Learner(TextReward):
        learns = True

        async def evolve(self, group: Group) -> None:
            seen.append(group.task.source)

    rubric = CompositeReward([Part(Learner("exact")), Part(TextReward("contains"))], {"b": ["contains"]})
    groups = [Group(id=name, task=replace(TASK, source=name), trajectories=(), draw=0) for name in ("a", "b")]
    asyncio.run(rubric.evolve(groups))
    assert seen == ["a"]
