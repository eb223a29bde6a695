"""The loop with real parts: learns, stays within its memory, and is not disturbed by evaluation."""

from __future__ import annotations

import asyncio
import copy
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from temper import loop
from temper.build import Listeners, build_stage, first_model, make_plan
from temper.config import RunConfig, resolve
from temper.engine.local.engine import LocalEngine
from temper.engine.local.step import Flight, Stepper
from temper.errors import BackendError
from temper.parity.check import Canary
from temper.rollout.source import RolloutSource
from temper.runs.records import AuditRecord
from temper.trainer.local import LocalTrainer
from temper.types import Batch, EvaluationResult, StepReport, TrainResult
from tests.fakes.selection import mostly_heavy


class Notes:
    """Keeps reports and the process's memory after each step."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self.evaluations: list[EvaluationResult] = []
        self.audits: list[AuditRecord] = []
        self.resident_bytes: list[int] = []

    def append(self, report: StepReport, batch: Batch) -> None:
        self.reports.append(report)
        self.resident_bytes.append(psutil.Process().memory_info().rss)

    def evaluation(self, result: EvaluationResult) -> None:
        self.evaluations.append(result)


def run(config: RunConfig, folder: Path) -> tuple[Notes, list[torch.Tensor]]:
    folder.mkdir(parents=True, exist_ok=True)
    notes = Notes()

    async def go() -> list[torch.Tensor]:
        listeners = Listeners(audit=lambda audits, effects: notes.audits.extend(audits))
        stage = build_stage(config, 0, first_model(config, folder), listeners=listeners)
        await loop.run(make_plan(stage, first_step=1, recorders=(notes,), checkpoint=lambda step: None))
        await stage.close()
        return [parameter.detach().clone() for parameter in stage.model.parameters()]

    return notes, asyncio.run(go())


def rl_config(recipe: dict[str, Any], **changes: Any) -> RunConfig:
    recipe = copy.deepcopy(recipe)
    recipe["stage"] = [{**recipe["stage"][1], **changes}]
    return resolve(recipe, [], where="test")[0]


def test_evaluation_cannot_change_training(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    own: dict[str, Any] = {"every": 1, "samples": 2, "temperature": 0.5, "top_p": 0.8, "max_new_tokens": 7}
    own["reward"] = [{"kind": "exact"}]
    often, weights_often = run(rl_config(tiny_recipe, evaluation=own), tmp_path / "a")
    seldom, weights_seldom = run(rl_config(tiny_recipe, evaluation={"every": 0}), tmp_path / "b")
    assert len(often.evaluations) > len(seldom.evaluations)
    assert len(often.audits) == 9 * (2 * 8 + 2 * 16), "nine times: all 8 greedy and 16 sampled attempts, top and random"
    assert {result.budget["max_new_tokens"] for result in often.evaluations} == {7}
    assert all("proxy_gap" in result.details for result in often.evaluations)
    assert all("reward_heldout_gap" in result.details for result in often.evaluations if result.step > 0)
    assert all(torch.equal(a, b) for a, b in zip(weights_often, weights_seldom, strict=True))
    assert [r.metrics for r in often.reports] == [r.metrics for r in seldom.reports]


@pytest.mark.parametrize("staleness", [1, 3])
def test_asynchronous_training_keeps_the_bound_and_corrects_for_it(
    staleness: int, tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    rollout = {"groups_per_step": 2, "group_size": 4, "max_staleness": staleness}
    config = rl_config(tiny_recipe, steps=6, rollout=rollout, objective={"corrections": ["token_tis"]})
    notes, _ = run(config, tmp_path)
    assert len(notes.reports) == 6
    assert max(report.max_staleness for report in notes.reports) <= staleness
    for report in notes.reports:
        system = report.system
        assert system["sys/rollout_tok_s"] == pytest.approx(system["sys/rollout_tokens"] / system["sys/step_time"])


def test_engine_and_trainer_take_turns_on_their_device(
    tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[LocalEngine] = []
    waiting: list[bool] = []
    steps: list[str] = []
    real_init, real_begin, real_trainer_step = LocalEngine.__init__, Stepper.begin, LocalTrainer.step

    def init(self: LocalEngine, *args: Any, **more: Any) -> None:
        real_init(self, *args, **more)
        begun.append(self)

    def begin(self: Stepper, version: int) -> Flight | None:
        steps.append("drawn")
        return real_begin(self, version)

    def trainer_step(self: LocalTrainer, batch: Batch) -> TrainResult:
        steps.append("trains")
        waiting.append(begun[0].has_work)
        time.sleep(0.1)
        result = real_trainer_step(self, batch)
        steps.append("trained")
        return result

    monkeypatch.setattr(LocalEngine, "__init__", init)
    monkeypatch.setattr(Stepper, "begin", begin)
    monkeypatch.setattr(LocalTrainer, "step", trainer_step)
    # One group at a time: something is left to draw when the trainer begins.
    few = {"groups_per_step": 2, "group_size": 4, "max_staleness": 2}
    run(rl_config(tiny_recipe, steps=4, rollout=few, engine={"max_running": 4}), tmp_path)
    assert any(waiting), "there must be something to draw while the trainer trains"
    assert all(steps[place + 1] == "trained" for place, what in enumerate(steps) if what == "trains")


@pytest.mark.parametrize(("staleness", "first"), [(0, "checked"), (1, "released")])
def test_new_weights_are_drawn_with_at_once_unless_steps_wait_for_each_other(
    staleness: int, first: str, tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, str]] = []
    real_check, real_release = Canary.check, RolloutSource.release

    async def check(self: Canary, version: int) -> Any:
        seen.append((version, "checked"))
        return await real_check(self, version)

    async def release(self: RolloutSource, version: int) -> None:
        seen.append((version, "released"))
        await real_release(self, version)

    monkeypatch.setattr(Canary, "check", check)
    monkeypatch.setattr(RolloutSource, "release", release)
    rollout = {"groups_per_step": 2, "group_size": 4, "max_staleness": staleness}
    run(rl_config(tiny_recipe, steps=3, rollout=rollout), tmp_path)
    assert [next(what for version, what in seen if version == step) for step in (1, 2, 3)] == [first] * 3


@pytest.mark.parametrize("staleness", [0, 1])
def test_nothing_is_trained_after_a_canary_that_found_something(
    staleness: int, tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []
    real_step = LocalTrainer.step

    async def check(self: Canary, version: int) -> None:
        await asyncio.sleep(0.2)  # longer than anything else takes
        if version == 2:
            raise BackendError("sampler and trainer disagree")

    def trainer_step(self: LocalTrainer, batch: Batch) -> TrainResult:
        trained.append(self.version + 1)
        return real_step(self, batch)

    monkeypatch.setattr(Canary, "check", check)
    monkeypatch.setattr(LocalTrainer, "step", trainer_step)
    rollout = {"groups_per_step": 2, "group_size": 4, "max_staleness": staleness}
    with pytest.raises(BackendError, match="sampler and trainer disagree"):
        # Neither evaluated nor saved in between: only the next step waits for the canary.
        run(
            rl_config(tiny_recipe, steps=4, rollout=rollout, evaluation={"every": 0}, checkpoint={"every": 9}), tmp_path
        )
    assert trained == [1, 2]


@pytest.mark.parametrize(
    "preset", mostly_heavy(["reinforce", "rloo", "dr_grpo", "dapo", "gspo", "cispo"], keep=("dapo",))
)
def test_every_preset_trains(preset: str, tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    changes = {"steps": 2, "objective": {"preset": preset}, "trainer": {"updates_per_batch": 2}}
    notes, weights = run(rl_config(tiny_recipe, **changes), tmp_path)
    assert [report.step for report in notes.reports] == [1, 2]
    assert all(torch.isfinite(parameter).all() for parameter in weights)
    assert notes.reports[0].metrics["policy/grad_norm"] > 0


def test_a_batch_is_trained_for_as_many_epochs_as_the_recipe_says(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    """PPO with its critic: more updates with every epoch, one version and one learning rate with every batch."""
    asked = {"optim": {"learning_rate": 1e-2, "critic_learning_rate": 1e-2, "schedule": "linear"}, "steps": 1}
    rollout = {"groups_per_step": 4, "group_size": 4}
    (once,), (thrice,) = (
        run(
            rl_config(
                {**tiny_recipe, "heldout": None},
                **asked,
                rollout=rollout,
                objective={"preset": "ppo"},
                trainer={"updates_per_batch": 2, "epochs": epochs},
            ),
            tmp_path / str(epochs),
        )[0].reports
        for epochs in (1, 3)
    )
    assert thrice.version == once.version == 1
    assert thrice.metrics["policy/learning_rate"] == once.metrics["policy/learning_rate"]
    assert thrice.metrics["data/tokens"] == 3 * once.metrics["data/tokens"]
    assert thrice.metrics["data/trained_trajectories"] == once.metrics["data/trained_trajectories"]
    assert thrice.system["sys/train_tokens"] == 3 * once.system["sys/train_tokens"]
    drifts = [thrice.metrics[f"epochs/kl_old_k3/{epoch}"] for epoch in (1, 2, 3)]
    assert drifts == sorted(drifts)
    assert drifts[0] == once.metrics["policy/kl_old_k3"] < drifts[1]
    assert once.traces
    assert thrice.traces == once.traces, "those of the first epoch"


def test_the_first_update_of_a_batch_is_exactly_on_policy(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    notes, _ = run(rl_config(tiny_recipe, steps=3), tmp_path)
    for report in notes.reports:
        assert report.metrics["policy/ratio_max"] == report.metrics["policy/ratio_min"] == 1.0
        assert report.metrics["policy/clip_frac_high"] == report.metrics["policy/clip_frac_low"] == 0.0


def test_learning_rate_zero_changes_nothing_and_the_gap_stays_flat(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    config = rl_config(tiny_recipe, steps=20, optim={"learning_rate": 0.0})
    notes, weights = run(config, tmp_path)
    fresh = build_stage(config, 0, tmp_path / "model").model
    assert all(torch.equal(a, b) for a, b in zip(weights, fresh.parameters(), strict=True))
    assert max(report.metrics["mismatch/logp_abs_max"] for report in notes.reports) < 1e-5


@pytest.mark.heavy
def test_host_memory_stays_flat_over_a_long_run(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    notes, _ = run(rl_config(tiny_recipe, steps=150, evaluation={"every": 0}), tmp_path)
    settled, last = notes.resident_bytes[50], notes.resident_bytes[-1]
    assert last - settled < 16 * 2**20, f"{(last - settled) / 2**20:.1f} MiB in 100 steps"
