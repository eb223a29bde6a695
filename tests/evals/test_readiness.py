"""Guarantee: a policy that is not fit for RL is refused by the check that is about its fault, and a fit one is not.

Planted faults: truncation that is not looked at, failed attempts left out of the shares, an error taken for a score.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence

import pytest
from rich.console import Console

from temper.envs.env import make_env
from temper.errors import UserError
from temper.evals import readiness
from temper.evals.readiness import THRESHOLDS, answers_of, first_prompts, has_form, measure, render, require_ready, roll
from temper.evals.suites import ANSWERS
from temper.models.tiny import character_tokenizer
from temper.rollout.episode import EpisodeSetup
from temper.tasks.render import Renderer
from temper.types import Group, Message, Request, SamplingParams, Score, Status, Task, Trajectory, Turn
from tests.fakes.episodes import FakeScorer
from tests.fakes.sampler import FakeSampler

RENDERER = Renderer(character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 "))
TASKS = [Task(id=f"t{i}", messages=(Message(role="user", content=f"q{i}"),), answer="a") for i in range(40)]
Script = Callable[[Request], list[int]]


def healthy(request: Request) -> list[int]:
    return RENDERER.completion_ids(random.Random(request.id).choice("abc"))


class Judge(FakeScorer):
    def __init__(self, verdict: Callable[[Task, Trajectory], Score]) -> None:
        self._verdict = verdict

    async def score(self, task: Task, trajectory: Trajectory) -> tuple[Score, Mapping[str, Score]]:
        score = self._verdict(task, trajectory)
        return score, {"exact": score, "format": Score.of(1.0), "format_2": Score.of(float("x" not in trajectory.text))}

    async def evolve(self, groups: Sequence[Group]) -> None:
        raise AssertionError("a gate teaches nobody")


def exact(task: Task, trajectory: Trajectory) -> Score:
    return Score.of(float(trajectory.text == task.answer))


def rolled(
    script: Script = healthy, verdict: Callable[[Task, Trajectory], Score] = exact, *, at_once: int = 7
) -> list[Group]:
    setup = EpisodeSetup(
        sampler=FakeSampler(script), renderer=RENDERER, scorer=Judge(verdict), make_env=make_env,
        params=SamplingParams(max_new_tokens=4, stop_ids=RENDERER.stop_ids), max_turns=1, episode_seconds=5.0, seed=0,
    )  # fmt: skip
    return asyncio.run(roll(setup, TASKS, group_size=4, at_once=at_once, name="ready/1"))


def failed(groups: Sequence[Group], **changed: float) -> list[str]:
    found = measure(groups, answer_of=ANSWERS["line"], thresholds={**THRESHOLDS, **changed})
    return [check.name for check in found.failed]


def test_a_fit_policy_passes_and_the_numbers_are_those_of_its_groups() -> None:
    groups = rolled()
    found = measure(groups, answer_of=ANSWERS["line"])
    assert found.failed == ()
    values = {check.name: check.value for check in found.checks}
    assert values["mixed"] == sum(not group.is_degenerate for group in groups) / 40
    answers = [len({t.text for t in group.trajectories}) for group in groups]
    assert values["distinct"] == sum(answers) / 40
    assert (values["format"], values["errors"], values["truncated"]) == (1.0, 0.0, 0.0)
    assert found.metrics["ready/failed"] == 0.0
    require_ready(found, is_forced=False)


def endless(request: Request) -> list[int]:
    """Every other response runs into the limit."""
    is_long = random.Random(f"{request.id} long").random() < 0.5
    return [RENDERER.encode("b")[0]] * 9 if is_long else healthy(request)


def test_a_policy_that_does_not_end_is_refused() -> None:
    assert failed(rolled(endless)) == ["truncated"]


def test_each_fault_fails_its_own_check() -> None:
    def same(request: Request) -> list[int]:
        return RENDERER.completion_ids("a")

    def formless(request: Request) -> list[int]:
        return RENDERER.completion_ids(random.Random(request.id).choice(["a", "b", "x"]))

    def crashing(task: Task, trajectory: Trajectory) -> Score:
        return Score.error("crash") if trajectory.index == 0 and task.id == "t3" else exact(task, trajectory)

    def blind(task: Task, trajectory: Trajectory) -> Score:
        return Score.of(0.0)

    assert failed(rolled(formless)) == ["format"]
    assert failed(rolled(verdict=crashing)) == []
    assert failed(rolled(verdict=crashing), errors=0.001) == ["errors"]
    assert failed(rolled(verdict=blind)) == ["mixed"]
    assert failed(rolled(same)) == ["mixed", "distinct"]
    assert failed(rolled(lambda request: RENDERER.completion_ids(""))) == ["format", "mixed", "distinct"]


def test_episodes_that_end_alike_are_told_apart_by_their_way() -> None:
    """All agents say "done" at the end; what they did before is what a group compares."""

    def lengthened(first: Callable[[int], str]) -> list[Group]:
        def episode(t: Trajectory) -> Trajectory:
            turns = [Turn(completion=t.turns[0].completion, message=said(words)) for words in (first(t.index), "done")]
            return dataclasses.replace(t, turns=tuple(turns))

        return [dataclasses.replace(group, trajectories=tuple(map(episode, group.trajectories))) for group in rolled()]

    def said(words: str) -> Message:
        return Message(role="assistant", content=words)

    def distinct(groups: list[Group]) -> float:
        checks = measure(groups, answer_of=ANSWERS["line"]).checks
        return next(check.value for check in checks if check.name == "distinct")

    assert distinct(lengthened(lambda index: f"add(i{index})")) == 4.0
    assert distinct(lengthened(lambda index: "pay()")) == 1.0


def test_thresholds_are_met_at_their_own_value() -> None:
    groups = rolled()
    values = {check.name: check.value for check in measure(groups, answer_of=ANSWERS["line"]).checks}
    assert failed(groups, **values) == []
    assert failed(groups, distinct=values["distinct"] + 1e-6) == ["distinct"]


def test_attempts_that_failed_have_neither_form_nor_answer() -> None:
    def broken(task: Task, trajectory: Trajectory) -> Score:
        return Score.error("crash")

    groups = [
        dataclasses.replace(
            group,
            trajectories=tuple(
                dataclasses.replace(t, turns=(), status=Status.TOOL_ERROR) if t.index < 2 else t
                for t in group.trajectories
            ),
        )
        for group in rolled(verdict=broken)
    ]
    found = {check.name: check.value for check in measure(groups, answer_of=ANSWERS["line"]).checks}
    assert (found["format"], found["errors"], found["mixed"]) == (0.5, 1.0, 0.0)


def test_the_answer_is_looked_for_as_the_reward_does() -> None:
    thought = Trajectory.saying("t", "one way\nThe answer is 4.")
    other = Trajectory.saying("t", "another way\nThe answer is 4.0.")
    assert answers_of(["format", "math"])(thought.text) == answers_of(["math"])(other.text)
    assert answers_of(["exact"])("reasons\n4") == answers_of(["exact"])("other reasons\n4")
    assert answers_of(["code"])("a = 1\nreturn") != answers_of(["code"])("a = 2\nreturn")
    assert not has_form(dataclasses.replace(thought, status=Status.BAD_FORMAT), ANSWERS["line"])
    assert not has_form(Trajectory.saying("t", "no number here"), ANSWERS["math"])


def test_the_same_prompts_are_rolled_once_and_few_are_said_to_be_few() -> None:
    again = [dataclasses.replace(task, id=f"{task.id}/2") for task in TASKS]
    assert first_prompts([*TASKS[:5], *again, *TASKS], 8) == [*TASKS[:5], *again[5:8]]
    assert first_prompts([*TASKS[:3], *again[:3]], 200) == TASKS[:3]
    few = measure(rolled(), answer_of=ANSWERS["line"])
    assert few.note == "40 training prompts instead of 200: there are no more different ones"
    assert measure(rolled(), answer_of=ANSWERS["line"], thresholds={**THRESHOLDS, "prompts": 40}).note == ""
    with pytest.raises(UserError, match="no training prompt"):
        measure([], answer_of=ANSWERS["line"])


def test_the_gate_says_the_same_whatever_runs_together() -> None:
    one, many = rolled(at_once=1), rolled(at_once=100)
    texts = [[[t.text for t in group.trajectories] for group in groups] for groups in (one, many)]
    assert texts[0] == texts[1]
    assert [group.draw for group in many] == list(range(40))


def test_the_refusal_names_value_threshold_and_remedy_and_can_be_overruled() -> None:
    found = measure(rolled(endless), answer_of=ANSWERS["line"])
    with pytest.raises(UserError) as caught:
        require_ready(found, is_forced=False)
    for words in ("truncated 0.", "(wanted <= 0.1)", "max_new_tokens", 'alarms.readiness = "note"'):
        assert words in str(caught.value)
    require_ready(found, is_forced=True)


def test_the_table_shows_every_check() -> None:
    console = Console(width=200)
    with console.capture() as shown:
        console.print(render(measure(rolled(endless), answer_of=ANSWERS["line"])))
    text = shown.get()
    for words in ("format:", "errors:", "mixed:", "distinct:", "truncated:", ">= 0.9", "<= 0.1", "FAIL", "pass"):
        assert words in text
    assert "40 training prompts instead of 200" in text


def plant_truncation_is_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    blind = tuple(
        (name, floor, (lambda *_: 0.0) if name == "truncated" else value, *words)
        for name, floor, value, *words in readiness._CHECKS
    )
    patch.setattr(readiness, "_CHECKS", blind)


def plant_only_completed_attempts_count(patch: pytest.MonkeyPatch) -> None:
    own = readiness.measure

    def flattering(groups: Sequence[Group], **settings: object) -> readiness.Readiness:
        kept = [
            dataclasses.replace(g, trajectories=tuple(t for t in g.trajectories if t.status is Status.COMPLETED))
            for g in groups
        ]
        return own([g for g in kept if g.trajectories], **settings)  # type: ignore[arg-type]

    patch.setitem(globals(), "measure", flattering)


@pytest.mark.parametrize("plant", [plant_truncation_is_not_looked_at, plant_only_completed_attempts_count])
def test_a_gate_that_overlooks_a_truncated_model_is_seen(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_policy_that_does_not_end_is_refused()
