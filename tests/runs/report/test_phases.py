"""A report says how often answers look back in every phase of training, from evaluations alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

from temper.runs.report.phases import phase_lines, phases_of
from temper.runs.report.report import as_json, make_report, render
from temper.runs.store.run_store import RunStore
from temper.types import EvaluationResult

EvaluationMaker = Callable[..., EvaluationResult]
STAGES = {0: "sft", 1: "rl"}


def looking_back(made: EvaluationResult, reflection: float, backtracking: float, samples: int = 4) -> EvaluationResult:
    def share(value: float) -> dict[str, float]:
        return {"score": value, "low": value / 2, "high": min(1.0, 2 * value), "prompts": 100}

    details = {"reflection": share(reflection), "backtracking": share(backtracking), "reward_mean": 0.5}
    return dataclasses.replace(made, details=details, samples_per_prompt=samples)


def evaluated(make: EvaluationMaker, *shares: tuple[int, int, float, float]) -> list[EvaluationResult]:
    """(stage, step, reflection, backtracking), asked greedily and sampled."""
    found = []
    for stage, step, reflection, backtracking in shares:
        found.append(looking_back(make(step, 0.5, stage), 1.0, 1.0, samples=1))
        found.append(looking_back(make(step, 0.5, stage, name="sampled"), reflection, backtracking))
    return found


def test_a_report_shows_signs_before_training_and_after_each_stage(
    store: RunStore, make_evaluation: EvaluationMaker
) -> None:
    for stage, name in STAGES.items():
        store.begin_stage(stage, name, 2)
    shares = ((0, 0, 0.0, 0.0), (0, 1, 0.9, 0.9), (0, 2, 0.25, 0.0), (1, 0, 0.25, 0.0), (1, 2, 0.4, 0.125))
    for result in evaluated(make_evaluation, *shares):
        store.evaluation(result)
    store.close()
    report = make_report(store.folder)
    text = render(report).splitlines()
    place = next(place for place, line in enumerate(text) if "signs of" in line)
    assert " ".join(text[place].split()) == "sampled answers with signs of start after 1 sft after 2 rl"
    assert text[place + 1].split("  ")[1] == "reflection"
    assert "0.0% [0.0, 0.0]" in text[place + 1]
    assert "25.0% [12.5, 50.0]" in text[place + 1]
    assert "40.0% [20.0, 80.0]" in text[place + 1]
    assert "12.5% [6.2, 25.0]" in text[place + 2]
    phases = json.loads(as_json(report))["phases"]
    assert [(phase["name"], phase["shares"]["reflection"][0]) for phase in phases] == [
        ("start", 0.0), ("after 1 sft", 0.25), ("after 2 rl", 0.4)
    ]  # fmt: skip


def test_a_stage_before_that_was_not_evaluated_is_not_taken_for_the_start(make_evaluation: EvaluationMaker) -> None:
    found = phases_of(evaluated(make_evaluation, (1, 0, 0.5, 0.0), (1, 2, 0.25, 0.0)), STAGES)
    assert [phase.name for phase in found] == ["before 2 rl", "after 2 rl"]
    assert {phase.asked for phase in found} == {"sampled"}


def test_answers_without_any_sign_and_runs_in_which_nobody_looked_take_no_lines(
    make_evaluation: EvaluationMaker,
) -> None:
    greedy = [looking_back(make_evaluation(step, 0.5), 0.0, 0.0, samples=1) for step in (0, 2)]
    phases = phases_of(greedy, STAGES)
    assert [phase.asked for phase in phases] == ["greedy", "greedy"]
    assert phase_lines(phases) == []
    assert phases_of([make_evaluation(0, 0.5)], STAGES) == ()
    assert phase_lines(()) == []
