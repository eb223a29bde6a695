"""Every alarm against a fault planted into a real run, and all of them against a healthy one.

Where the fault would need hours, another machine or a stage of its own, it is planted into the history of the healthy
run instead.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from temper import loop
from temper.build import Stage, build_stage, first_model, make_plan
from temper.config import RunConfig, merge, resolve
from temper.envs.env import ENVS
from temper.evals.passk import clustered_interval
from temper.protocols import EnvOpening, EnvReply
from temper.rollout.episode import run_episode
from temper.runs.alarms.alarms import Alarms
from temper.runs.alarms.rules import RULES, configure
from temper.runs.records import AlarmRecord
from temper.types import Batch, EvaluationResult, Event, EventKind, Message, Score, StepReport, Task, Trajectory

pytestmark = pytest.mark.heavy  # a dozen real runs

Scorer = Callable[[Task, Trajectory], Score]
CLOCKS = ("throughput_drop", "trainer_starving")
"""Rules about time: not asked of real runs on a machine that others use, unless time is the planted fault."""


class Notes:
    """Keeps what a run reported, and may do something after each step."""

    def __init__(self, after_step: Callable[[int], None] = lambda step: None) -> None:
        self.reports: list[StepReport] = []
        self.evaluations: list[EvaluationResult] = []
        self._after_step = after_step

    def append(self, report: StepReport, batch: Batch) -> None:
        self.reports.append(report)
        self._after_step(report.step)

    def evaluation(self, result: EvaluationResult) -> None:
        self.evaluations.append(result)


def run(
    config: RunConfig,
    model: Path,
    *,
    reward: Scorer | None = None,
    plant: Callable[[Stage], Callable[[int], None] | None] = lambda stage: None,
) -> Notes:
    """Trains one stage. reward: what training is paid for, while the held-out score stays that of the recipe."""

    async def go() -> Notes:
        stage = build_stage(config, 0, model)
        notes = Notes(plant(stage) or (lambda step: None))
        score_turns = stage.data.rubric.score_turns

        async def honest(task: Task, trajectory: Trajectory) -> tuple[Score, dict[str, Score]]:
            return (await score_turns(task, trajectory))[:2]

        if reward is not None:

            async def paid(task: Task, trajectory: Trajectory) -> tuple[Score, dict[str, Score], list[float]]:
                return reward(task, trajectory), {}, []

            stage.data.rubric.score_turns = paid  # type: ignore[method-assign]
        plan = make_plan(stage, first_step=1, recorders=(notes,), checkpoint=lambda step: None)
        plan = dataclasses.replace(plan, evaluate=lambda step, metrics: judged(stage, honest, step))
        try:
            await loop.run(plan)
        finally:
            await stage.close()
        return notes

    return asyncio.run(go())


async def judged(stage: Stage, honest: Any, step: int) -> list[EvaluationResult]:
    """The held-out score by a verifier that training does not see."""
    tasks = [(task, k) for task in stage.data.heldout for k in range(2)]
    name = f"eval/{step}"
    episodes = (
        run_episode(stage.setup, task, group_id=task.id, index=k, request_id=f"{name}/{task.id}/{k}")
        for task, k in tasks
    )
    played = await asyncio.wait_for(asyncio.gather(*episodes), 120)
    values = [(await honest(task, trajectory))[0].value for (task, _), trajectory in zip(tasks, played, strict=True)]
    scores = [values[place : place + 2] for place in range(0, len(values), 2)]
    score, low, high = clustered_interval(scores)
    return [
        EvaluationResult(
            stage=0, step=step, name="sampled", score=score, low=low, high=high, num_prompts=len(scores),
            samples_per_prompt=2, constant_score=0.0, budget={},
        )
    ]  # fmt: skip


def raised(
    reports: Iterable[StepReport], evaluations: Iterable[EvaluationResult] = (), *, off: Iterable[str] = CLOCKS
) -> set[str]:
    """Names of all alarms that a history raises."""
    alarms: list[AlarmRecord] = []
    watch = Alarms(configure(dict.fromkeys(off, "off")), Path("nowhere"), alarms.append)
    results = list(evaluations)
    for report in reports:
        watch.append(report, Batch(updates=()))
        for result in (result for result in results if result.step == report.step):
            watch.evaluation(result)
    return {alarm.rule for alarm in alarms}


TABLE: dict[str, Any] = {
    "name": "planted",
    "model": {"new": {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "mlp_width": 64, "context": 32,
                      "alphabet": "abcdefghijklmnopqrstuvwxyz"}},
    "train": [{"generator": "spell_backward", "seed": 1, "options": {"min_letters": 2, "max_letters": 3}}],
    "heldout": {"generator": "spell_backward", "seed": 2, "size": 16, "options": {"min_letters": 2, "max_letters": 3}},
    "reward": [{"kind": "edit"}],
    "sampling": {"max_new_tokens": 6},
    "rollout": {"groups_per_step": 4, "group_size": 8},
    "optim": {"learning_rate": 5e-4},
}  # fmt: skip


def rl(**changes: Any) -> RunConfig:
    return resolve(merge(TABLE, {"steps": 6, **changes}), [], where="test")[0]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has imitated for a while: it answers and ends its answers, often wrongly."""
    folder = tmp_path_factory.mktemp("warm")
    changes = {"stage": "sft", "steps": 60, "optim": {"learning_rate": 5e-3}, "trainer": {"examples_per_step": 32}}

    def keep(stage: Stage) -> Callable[[int], None]:
        return lambda step: stage.trainer.save(folder / "warm") if step == 60 else None

    config = rl(**changes)
    assert raised(run(config, first_model(config, folder), plant=keep).reports) == set(), "imitation is healthy too"
    return folder / "warm"


@pytest.fixture(scope="module")
def healthy(warm: Path) -> Notes:
    """It learns by reward for 40 steps."""
    return run(rl(steps=40, evaluation={"every": 5}, rollout={"groups_per_step": 8, "group_size": 8}), warm)


def with_steady_clock(reports: Iterable[StepReport], repeat: int = 1) -> list[StepReport]:
    """The same run on a machine of its own: seconds that vary by a tenth. repeat: so often over, one after another."""
    random_ = random.Random(0)
    steady = [
        dataclasses.replace(
            report, seconds={name: spent * random_.uniform(0.9, 1.1) for name, spent in FAIR_SECONDS.items()},
            system={**report.system, "sys/train_tokens": 2000.0, "sys/peak_memory_bytes": 5e8},
        )
        for _ in range(repeat)
        for report in reports
    ]  # fmt: skip
    return [dataclasses.replace(report, step=number) for number, report in enumerate(steady, start=1)]


FAIR_SECONDS = {"rollout": 0.4, "forward_backward": 0.5, "publish": 0.1}


def test_a_healthy_run_raises_nothing(healthy: Notes) -> None:
    assert len(healthy.reports) == 40
    first, last = healthy.reports[0].metrics["reward/mean"], healthy.reports[-1].metrics["reward/mean"]
    assert last > first, "it must learn, or its silence says little"
    assert raised(with_steady_clock(healthy.reports), healthy.evaluations, off=()) == set()


def test_a_reward_for_length_is_seen_as_hacking_and_as_growing_answers(warm: Path) -> None:
    config = rl(steps=30, sampling={"max_new_tokens": 24}, evaluation={"every": 5})
    notes = run(config, warm, reward=lambda task, trajectory: Score.of(trajectory.num_tokens / 24))
    found = raised(notes.reports, notes.evaluations)
    follow = {"truncation", "no_learning_signal"}  # once every answer has the greatest length
    assert {"reward_hacking", "length_blowup"} <= found <= {"reward_hacking", "length_blowup", *follow}


def test_gradients_that_never_arrive_are_seen(warm: Path) -> None:
    def detach(stage: Stage) -> None:
        for parameter in stage.model.parameters():
            parameter.register_hook(torch.zeros_like)

    assert raised(run(rl(steps=6), warm, plant=detach).reports) == {"zero_gradient"}


def test_a_learning_rate_of_zero_is_seen(warm: Path) -> None:
    notes = run(rl(steps=8, optim={"learning_rate": 0.0}), warm)
    assert raised(notes.reports) == {"parameters_unchanged"}


def test_a_learning_rate_that_is_far_too_high_is_seen_as_a_collapse(warm: Path) -> None:
    def share_of_one_letter(task: Task, trajectory: Trajectory) -> Score:
        return Score.of(0.5 * trajectory.text.count("e") / max(1, trajectory.num_tokens))

    config = rl(steps=40, optim={"learning_rate": 5e-3}, evaluation={"every": 0})
    found = raised(run(config, warm, reward=share_of_one_letter).reports)
    assert "entropy_collapse" in found
    follow = {"no_learning_signal", "identical_members", "truncation"}
    assert found <= {"entropy_collapse", *follow}, "what follows from a collapse may be seen as well"


def test_an_update_that_moves_too_far_is_seen_in_the_kl(warm: Path) -> None:
    def shake(stage: Stage) -> Callable[[int], None]:
        def after(step: int) -> None:
            if step == 14:
                for parameter in stage.model.parameters():
                    parameter.data += 0.15 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))

        return after

    objective = {"preset": "grpo", "regularizers": [{"name": "kl", "coefficient": 0.001}]}
    notes = run(rl(steps=16, objective=objective), warm, plant=shake)
    assert raised(notes.reports) == {"kl_spike"}


def test_a_verifier_that_fails_on_some_answers_is_seen(warm: Path) -> None:
    def flaky(task: Task, trajectory: Trajectory) -> Score:
        if trajectory.index == 1:
            return Score.error("the verifier crashed")
        return Score.of(len(set(trajectory.text)) / 4)

    config = rl(steps=5, rollout={"groups_per_step": 4, "group_size": 8, "error_limit": 1.0})
    assert raised(run(config, warm, reward=flaky).reports) == {"verifier_errors"}


class BrokenTools:
    """Every reply calls a tool, and every second one fails."""

    calls = 0

    async def start(self, task: Task, seed: int) -> EnvOpening:
        return EnvOpening(messages=task.messages)

    async def step(self, message: Message) -> EnvReply:
        BrokenTools.calls += 1
        called = Event(kind=EventKind.TOOL_CALL, name="search")
        failed = Event(kind=EventKind.TOOL_ERROR, name="search", detail="connection refused")
        return EnvReply(is_done=True, events=(called, failed) if BrokenTools.calls % 2 else (called,))

    async def close(self) -> None:
        pass


def test_tools_that_fail_are_seen(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVS, "broken_tools", BrokenTools)
    notes = run(rl(steps=6, env={"name": "broken_tools"}), warm)
    assert raised(notes.reports) == {"tool_errors"}


def test_a_temperature_near_zero_is_seen_as_identical_members(warm: Path) -> None:
    config = rl(steps=12, sampling={"max_new_tokens": 4, "temperature": 0.001})
    assert raised(run(config, warm).reports) == {"identical_members"}


def test_answers_that_do_not_fit_are_seen(warm: Path) -> None:
    assert raised(run(rl(steps=6, sampling={"max_new_tokens": 1}), warm).reports) == {"truncation"}


def test_a_reward_that_tells_nothing_apart_is_seen(warm: Path) -> None:
    notes = run(rl(steps=12), warm, reward=lambda task, trajectory: Score.of(0.0))
    assert raised(notes.reports) == {"no_learning_signal"}
    # Three times as long, the stage has learned nothing since it began.
    assert raised(notes.reports * 3) == {"no_learning_signal", "nothing_to_learn"}


def test_a_verifier_that_suddenly_accepts_everything_is_seen(warm: Path) -> None:
    step_now = [0]

    def plant(stage: Stage) -> Callable[[int], None]:
        return lambda step: step_now.__setitem__(0, step)

    def generous(task: Task, trajectory: Trajectory) -> Score:
        is_right = "aeiou".find(trajectory.text[:1] or "?") >= 0
        return Score.of(1.0 if is_right or (step_now[0] >= 24 and trajectory.index) else 0.0)

    notes = run(rl(steps=28, optim={"learning_rate": 1e-4}), warm, reward=generous, plant=plant)
    assert raised(notes.reports) == {"reward_jump"}


def test_a_slow_environment_starves_the_trainer(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(BrokenTools):
        async def step(self, message: Message) -> EnvReply:
            await asyncio.sleep(1.5)
            return EnvReply(is_done=True)

    monkeypatch.setitem(ENVS, "slow", Slow)
    rollout = {"groups_per_step": 2, "group_size": 4, "max_staleness": 1}
    config = rl(steps=12, env={"name": "slow"}, rollout=rollout)
    assert raised(run(config, warm).reports, off=["throughput_drop"]) == {"trainer_starving"}


Fault = Callable[[StepReport], Mapping[str, Mapping[str, float] | float]]


def late(change: Fault) -> Fault:
    """The fault begins at step 60."""
    return lambda report: change(report) if report.step >= 60 else {}


PLANTED: dict[str, Fault] = {
    "mismatch": late(lambda r: {"metrics": {"mismatch/kl_k3": 0.03, "mismatch/logp_abs_max": 2.0}}),
    "expert_collapse": lambda r: {"metrics": {"route/load_max": 3.0 if r.step >= 60 else 1.6}},
    "router_collapse": lambda r: {"metrics": {"route/entropy": 0.9 if r.step >= 60 else 2.0}},
    "routes_moved": lambda r: {"metrics": {"route/moved_frac": 0.4 if r.step >= 60 else 0.03}},
    "router_shift": lambda r: {"metrics": {"route/shift": 0.4 if r.step >= 60 else 0.02}},
    "throughput_drop": late(lambda r: {"seconds": {name: 3 * spent for name, spent in r.seconds.items()}}),
    "memory_growth": lambda r: {"system": {"sys/peak_memory_bytes": 5e8 * 1.003**r.step}},
    "not_finite": late(lambda r: {"metrics": {"policy/grad_norm": math.inf}}),
    # Measured with every tenth step; a real run with a real judge: tests/rewards/judges/test_agreement.py.
    "judge_changed": lambda r: {} if r.step % 10 else {"system": {"judge/kappa_fall": 0.2 if r.step >= 60 else -0.1}},
    "likelihood_displacement": lambda r: {
        "metrics": {
            "preference/chosen_logprob": -20 - max(0, r.step - 60) * 0.5 + 0.1 * math.sin(r.step),
            "preference/margin": 0.01 * r.step,
        }
    },
    "length_exploitation": lambda r: {
        "metrics": {
            "preference/reward_length_correlation": (0.7 if r.step >= 60 else 0.1) + 0.1 * math.sin(r.step),
            "preference/accuracy": 0.8,
            "preference/log_ratio": 0.3,
        }
    },
}


@pytest.mark.parametrize("rule", PLANTED)
def test_a_fault_planted_into_a_real_history_is_seen(rule: str, healthy: Notes) -> None:
    def planted(report: StepReport) -> StepReport:
        changes: dict[str, Any] = {
            name: {**getattr(report, name), **value} for name, value in PLANTED[rule](report).items()
        }
        return dataclasses.replace(report, **changes)

    # The end of the run again and again: a learner that has arrived.
    history = with_steady_clock(healthy.reports[-20:], repeat=7)
    assert raised(history, off=()) == set()
    assert raised(map(planted, history), off=()) == {rule}


def test_every_rule_has_a_planted_fault() -> None:
    """The names in this file, but for the gate before RL and the rule that stops early: tested elsewhere."""
    text = Path(__file__).read_text()
    elsewhere = ["readi" + "ness", "held_out" + "_stalled"]
    assert [rule.name for rule in RULES if f'"{rule.name}"' not in text] == elsewhere
