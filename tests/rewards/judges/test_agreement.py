"""A judge's agreement with people: an interval for its fall, errors apart, the start kept over a resume, one alarm."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from temper.commands.training.train import train
from temper.config import resolve, to_toml
from temper.rewards.composite import CompositeReward
from temper.rewards.judges.agreement import JudgeAgreement, LabelledCase, LabelledSet, agreement_of, kappa_fall
from temper.rewards.judges.evolving import EvolvingRubricReward
from temper.rewards.judges.judge import JudgeReward
from temper.runs.reader import RunReader
from temper.types import Score, Task

CASES = 20


def agreement(kappa: float, low: float, high: float) -> JudgeAgreement:
    return JudgeAgreement(agreement=0.9, kappa=kappa, low=low, high=high, num_labelled=9, num_unscorable=0)


def test_the_fall_on_intervals_worked_by_hand() -> None:
    # 0.9 - 0.4 = 0.5, less the root of 0.3^2 + 0.4^2.
    start, now = agreement(0.9, 0.6, 0.95), agreement(0.4, 0.1, 0.8)
    assert kappa_fall(start, now) == pytest.approx(0.0)
    assert kappa_fall(start, dataclasses.replace(now, high=0.7)) == pytest.approx(0.5 - math.hypot(0.3, 0.3))
    assert kappa_fall(now, start) < -0.5, "a rise is no fall"


def noisy(source: random.Random, rightness: float, size: int = 100) -> JudgeAgreement:
    """A judge that is right about that share of cases, anew at each measurement."""
    task = Task(id="t", messages=())
    cases = [LabelledCase(task=task, response="", label=float(place % 2)) for place in range(size)]
    said = [(case, Score.of(case.label if source.random() < rightness else 1 - case.label)) for case in cases]
    return agreement_of(cases, said)


def test_chance_is_seldom_a_fall_and_a_fall_is_seldom_chance() -> None:
    source = random.Random(0)
    pairs = [(noisy(source, 0.85), noisy(source, 0.85)) for _ in range(2000)]
    assert sum(kappa_fall(*pair) > 0 for pair in pairs) / 2000 < 0.035, "95% leave 2.5% on this side"
    # The mutation: a bare difference would cry every other time.
    assert sum(start.kappa > now.kappa for start, now in pairs) / 2000 > 0.4
    fallen = [(noisy(source, 0.9), noisy(source, 0.65)) for _ in range(500)]
    assert sum(kappa_fall(*pair) > 0 for pair in fallen) / 500 > 0.95


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    rows = [{"prompt": "labelled", "response": f"worth {i % 2}", "label": i % 2} for i in range(CASES)]
    path = tmp_path / "labels.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def honest(texts: dict[str, str]) -> dict[str, int] | None:
    return {"score": 9 if "worth 1" in texts["response"] else 1}


def flattering(texts: dict[str, str]) -> dict[str, int] | None:
    return {"score": 10}


def measured(reward: JudgeReward, *, starts: bool = True) -> dict[str, float]:
    async def go() -> dict[str, float]:
        if starts:
            await reward.start()
        found = await reward.labels.measure()
        await reward.close()
        return found

    return asyncio.run(go())


def test_a_judge_that_changed_has_fallen_and_one_that_did_not_has_not(server: Any, labels: Path) -> None:
    server.answer = honest
    reward = JudgeReward(**server.options(labelled=str(labels)))
    same = measured(reward)
    assert (same["kappa"], same["agreement"], same["labelled_errors"]) == (1.0, 1.0, 0.0)
    assert same["kappa_fall"] < 0
    server.answer = flattering
    changed = measured(reward, starts=False)
    assert (changed["kappa"], changed["agreement"]) == (0.0, 0.5)
    # Wilson of 20 of 20 begins at 0.8389, of 10 of 20 ends at 0.7007; on kappa's scale 0.6777 and 0.4014.
    assert changed["kappa_fall"] == pytest.approx(1 - math.hypot(1 - 0.6777, 0.4014), abs=1e-3)
    assert measured(JudgeReward(**server.options())) == {}, "nothing labelled, nothing measured"
    assert measured(JudgeReward(**server.options(labelled=str(labels))), starts=False) == {}, "nothing to fall from"


def test_errors_of_the_judge_are_counted_as_errors_and_never_as_disagreement(server: Any, labels: Path) -> None:
    server.answer = honest
    reward = JudgeReward(**server.options(labelled=str(labels)))
    asyncio.run(reward.start())
    first = iter(range(10**6))
    server.answer = lambda texts: None if next(first) < 6 else honest(texts)
    some = measured(reward, starts=False)
    assert (some["agreement"], some["kappa"], some["labelled_errors"]) == (1.0, 1.0, 6.0)
    assert some["kappa_low"] < 0.678, "fewer cases prove less"
    assert some["kappa_fall"] < 0
    server.answer = lambda texts: None
    assert measured(reward, starts=False) == {"labelled_errors": CASES}
    server.answer = lambda texts: None if "worth 0" in texts["response"] else honest(texts)
    assert measured(reward, starts=False) == {"labelled_errors": CASES / 2}, "one label alone shows nothing"
    # A verdict that cannot be read is another thing: the judge was there and agreed with nobody.
    server.answer = lambda texts: {"mood": "good"} if "worth 0" in texts["response"] else honest(texts)
    unreadable = measured(reward, starts=False)
    assert (unreadable["agreement"], unreadable["labelled_errors"]) == (0.5, 0.0)


def test_a_judge_that_raises_does_not_end_the_run_it_is_measured_in(labels: Path) -> None:
    class Moody:
        name = "moody"
        is_ill = False

        async def score(self, task: Task, trajectory: Any) -> Score:
            if self.is_ill:
                raise RuntimeError("no mood")
            return Score.of(float(trajectory.text.endswith("1")))

        def check(self, task: Task) -> str | None:
            return None

        async def close(self) -> None:
            pass

    judge = Moody()
    cases = LabelledSet(judge, path=str(labels), floor=0.0, model="m")
    asyncio.run(cases.start())
    judge.is_ill = True
    assert asyncio.run(cases.measure()) == {"labelled_errors": CASES}


def test_a_resumed_run_is_compared_with_the_start_of_the_first(server: Any, labels: Path) -> None:
    def rubric() -> CompositeReward:
        return CompositeReward([(JudgeReward(**server.options(labelled=str(labels))), 1.0)])

    def fall(resumed: CompositeReward) -> float:
        async def go() -> float:
            await resumed.start()
            await resumed.measure_again()
            await resumed.close()
            return resumed.metrics()["judge/kappa_fall/judge"]

        return asyncio.run(go())

    server.answer = honest
    first = rubric()
    asyncio.run(first.start())
    state = json.loads(json.dumps(first.state()))
    server.answer = flattering  # while the run was down
    resumed = rubric()
    resumed.load_state(state)
    assert fall(resumed) > 0.4
    assert resumed.state() == first.state(), "the start stays the start, however often the run is resumed"
    assert fall(rubric()) < 0, "the mutation: a resume that began anew would see no change"
    old = rubric()
    old.load_state({name: value for name, value in state.items() if name != "agreement"})
    assert fall(old) < 0, "a checkpoint that does not know begins here"
    labels.write_text("\n".join(labels.read_text().splitlines()[2:]))
    other = rubric()
    other.load_state(state)
    assert fall(other) < 0, "agreement with other cases is no measure for these"


def test_what_was_measured_is_told_once_and_by_part(server: Any, labels: Path) -> None:
    server.answer = honest
    options = server.options(labelled=str(labels))
    rubric = CompositeReward(
        [(JudgeReward(**options), 1.0), (JudgeReward(**options), 1.0), (JudgeReward(**server.options()), 1)]
    )

    async def go() -> None:
        await rubric.start()
        await rubric.measure_again()
        await rubric.close()

    asyncio.run(go())
    told = rubric.metrics("heldout/")
    assert {name for name in told if "kappa/" in name} == {"judge/kappa/heldout/judge", "judge/kappa/heldout/judge_2"}
    assert told["judge/heldout/judge_value"] == 2 * CASES
    assert not any("kappa" in name for name in rubric.metrics()), "a step without a measurement has none"


def test_cases_leave_no_trace_in_a_rubric_that_evolves(server: Any, tmp_path: Path) -> None:
    own = [json.dumps([{"criterion": f"is {i}", "weight": 1}]) for i in range(4)]
    rows = [{"prompt": "p", "response": "r", "label": i % 2, "rubric": rubric} for i, rubric in enumerate(own)]
    (tmp_path / "labels.jsonl").write_text("\n".join(map(json.dumps, rows)))
    server.answer = lambda texts: {"score": 10 * (int(texts["criterion"][-1]) % 2)}
    reward = EvolvingRubricReward(**server.options(labelled=str(tmp_path / "labels.jsonl")))

    async def go() -> dict[str, float]:
        found = await reward.start()
        await reward.close()
        return found

    assert asyncio.run(go())["evolving_rubric/kappa"] == 1.0, "each case is judged by its own criteria"
    assert not reward._open, "groups of the run are not pushed out"


@pytest.fixture
def write(tiny_recipe: dict[str, Any], server: Any, labels: Path, tmp_path: Path) -> Callable[..., Path]:
    """A recipe whose judge agrees with its labels at the gate and at step 3, and flatters from then on."""
    asked = iter(range(10**6))

    def answer(texts: dict[str, str]) -> dict[str, int] | None:
        if "labelled" not in texts["task"]:
            return {"score": sum(map(ord, texts["response"])) % 11}
        return honest(texts) if next(asked) < 2 * CASES else flattering(texts)

    server.answer = answer

    def make(heldout: bool = True, verifies: bool = False, **alarms: Any) -> Path:
        nonlocal asked
        asked = iter(range(10**6))
        recipe = copy.deepcopy(tiny_recipe)
        if not heldout:
            del recipe["heldout"]
        judge = {"kind": "judge", "options": server.options(labelled=str(labels))}
        recipe |= {"stage": recipe["stage"][1:], "reward": [{"kind": "edit"}, *([] if verifies else [judge])]}
        if verifies:
            recipe["evaluation"] = {"reward": [judge]}
        path = tmp_path / "recipe.toml"
        path.write_text(to_toml(resolve({**recipe, "alarms": {**recipe["alarms"], **alarms}}, [], where="test")))
        return path

    return make


def told_by(run: Path) -> tuple[dict[int, dict[str, float]], list[tuple[str, int]]]:
    """Agreement by step, and the alarms about it."""
    with RunReader(run) as reader:
        rows = reader.query("SELECT step, name, value FROM metrics WHERE name LIKE 'judge/%/judge' ORDER BY step, name")
        steps: dict[int, dict[str, float]] = {}
        for row in rows:
            steps.setdefault(row["step"], {})[row["name"]] = row["value"]
        return steps, [(alarm.rule, alarm.step) for alarm in reader.alarms() if alarm.rule == "judge_changed"]


@pytest.mark.heavy
def test_a_run_measures_its_judge_with_every_evaluation_and_a_resume_changes_nothing(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    whole = train(write(), run=tmp_path / "whole")
    steps, alarms = told_by(whole)
    assert {step: found["judge/kappa/judge"] for step, found in steps.items()} == {3: 1.0, 6: 0.0, 8: 0.0}
    assert steps[3]["judge/kappa_fall/judge"] < 0 < 0.4 < steps[6]["judge/kappa_fall/judge"]
    assert alarms == [("judge_changed", 6)], "raised once"
    with RunReader(whole) as reader:
        groups = [[v.group_id for v in reader.verdicts(0, step)].count("labelled") for step in range(9)]
    assert groups == [CASES, 0, 0, CASES, 0, 0, CASES, 0, CASES]

    recipe = write(judge_changed="stop")
    stopped = train(recipe, run=tmp_path / "stopped")
    assert max(told_by(stopped)[0]) == 6
    train(recipe, run=stopped, resume=True)
    assert told_by(stopped) == (steps, alarms)
    with RunReader(whole) as one, RunReader(stopped) as other:
        assert one.fingerprint()["metrics"] == other.fingerprint()["metrics"]


@pytest.mark.heavy
def test_a_run_without_held_out_tasks_measures_its_judge_all_the_same(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    steps, alarms = told_by(train(write(heldout=False), run=tmp_path / "run"))
    assert sorted(steps) == [3, 6, 8]
    assert alarms == [("judge_changed", 6)]


@pytest.mark.heavy
def test_a_judge_that_only_verifies_held_out_tasks_is_measured_too(write: Callable[..., Path], tmp_path: Path) -> None:
    steps, alarms = told_by(train(write(verifies=True), run=tmp_path / "run"))
    assert {step: found["judge/kappa/heldout/judge"] for step, found in steps.items()} == {3: 1.0, 6: 0.0, 8: 0.0}
    assert alarms == [("judge_changed", 6)]
