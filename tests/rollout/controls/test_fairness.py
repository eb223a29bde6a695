"""Controls change when a prompt is trained, not how often: two of twenty prompts have answers eight times as long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from temper.rollout.source import RolloutSource
from temper.simulate.clock import run_virtual
from temper.types import Group, Task
from tests.fakes.fairness import TASKS, UNFAIR, chi_square
from tests.fakes.rolling import Flow, Run, train
from tests.fakes.tail import TailSampler
from tests.simulate.test_controlled_schedules import LosesWhoWasCut

LONG, SHORT = 64, 8
SKIPPED, STEPS = 20, 80
"""Steps of a run that are not counted, since it has put off nobody yet, and all of them."""
SEEDS = 4

SETTINGS: dict[str, tuple[int, list[Any]]] = {
    "oversample, synchronous": (0, [{"name": "oversample", "factor": 1.5}]),
    "oversample": (4, [{"name": "oversample", "factor": 2.0}]),
    "tail": (0, [{"name": "tail", "quantile": 0.8}]),
    "partial": (4, ["partial"]),
    "partial and oversample": (4, ["partial", {"name": "oversample", "factor": 2.0}]),
}
"""Staleness bound and controls."""


def length_of(name: str) -> int:
    """Of "t3#17", a draw of the prompt t3."""
    return LONG if task_of(name) < 2 else SHORT


def task_of(name: str) -> int:
    return int(name[1:].split("#")[0])


def run(seed: int, staleness: int, controls: Sequence[Any], make_source: Any = RolloutSource) -> Run:
    async def work() -> Run:
        sampler = TailSampler(length_of)
        flow = Flow(staleness=staleness, num_tasks=TASKS, seed=seed, controls=controls, make_source=make_source)
        return await train(flow.open(sampler), sampler, range(1, STEPS + 1), train_seconds=2.0)

    return run_virtual(work())


def trained_in(runs: Sequence[Run]) -> list[Group]:
    return [group for one in runs for batch in one.batches[SKIPPED:] for group in batch.groups]


def unfairness(runs: Sequence[Run]) -> float:
    return chi_square(Counter(task_of(group.task.id) for group in trained_in(runs)), range(TASKS))


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_is_trained_with_controls_is_distributed_as_what_was_offered(setting: str) -> None:
    runs = [run(seed, *SETTINGS[setting]) for seed in range(SEEDS)]
    assert unfairness(runs) < UNFAIR
    lengths = {
        (task_of(group.task.id) < 2, member.num_tokens) for group in trained_in(runs) for member in group.trajectories
    }
    assert lengths == {(True, LONG), (False, SHORT)}, "and answers are as long as they are"


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_epoch_that_is_over_has_trained_each_prompt_once(setting: str) -> None:
    """The offered distribution itself, where the chi-square has noise: but for the last steps nothing is missing."""
    one = run(0, *SETTINGS[setting])
    tasks = {group.draw: task_of(group.task.id) for batch in one.batches for group in batch.groups}
    # Who was put off may wait for 16 steps of 4 groups, which is more than three epochs.
    for epoch in range(4 * STEPS // TASKS - 5):
        trained = [tasks.get(draw, -1) for draw in range(epoch * TASKS, (epoch + 1) * TASKS)]
        assert sorted(trained) == list(range(TASKS))


class DropsMixed(RolloutSource):
    """A group that several versions drew is not trained."""

    async def _rolled(self, draw: int, task: Task) -> tuple[Group, str | None]:
        group, reason = await super()._rolled(draw, task)
        versions = {by for member in group.trajectories for by in member.turns[0].completion.versions}
        return group, reason or ("several versions" if len(versions) > 1 else None)


BIASED = {
    "oversample, synchronous": LosesWhoWasCut,
    "tail": LosesWhoWasCut,
    "partial": DropsMixed,
    "partial and oversample": DropsMixed,
}


@pytest.mark.parametrize("setting", BIASED)
def test_a_control_that_favours_short_answers_is_found(setting: str) -> None:
    assert unfairness([run(seed, *SETTINGS[setting], BIASED[setting]) for seed in range(SEEDS)]) > UNFAIR
