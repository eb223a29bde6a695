"""Warming up a stage: what it expects to meet, and that a run does not notice it."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from temper import loop
from temper.build import Listeners, Stage, build_stage, first_model, make_plan, warm
from temper.build.memory import workload_of
from temper.config import resolve
from temper.trainer.local import LocalTrainer
from temper.types import Batch, EvaluationResult, Sample, StepReport


class Reports(list[StepReport]):
    def append(self, report: StepReport, batch: Batch | None = None) -> None:
        super().append(report)

    def evaluation(self, result: EvaluationResult) -> None:
        pass


def make_stage(recipe: dict[str, Any], folder: Path, number: int, listeners: Listeners, **changes: Any) -> Stage:
    recipe = copy.deepcopy(recipe)
    recipe["stage"] = [{**recipe["stage"][number], "steps": 2, **changes}]
    (config,) = resolve(recipe, [], where="test")
    folder.mkdir(parents=True, exist_ok=True)
    return build_stage(config, 0, first_model(config, folder), listeners=listeners)


def run(stage: Stage) -> tuple[Reports, dict[str, torch.Tensor]]:
    reports = Reports()

    async def go() -> None:
        await loop.run(make_plan(stage, first_step=1, recorders=(reports,), checkpoint=lambda step: None))
        await stage.close()

    asyncio.run(go())
    return reports, {name: parameter.detach().clone() for name, parameter in stage.model.named_parameters()}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "pick_device", lambda asked: torch.device("cuda"))


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of the rows of every rehearsal."""
    tokens: list[int] = []
    real = LocalTrainer.warm_up

    def warm_up(self: LocalTrainer, rows: list[Sample]) -> None:
        tokens.append(sum(len(row.token_ids) for row in rows))
        real(self, rows)

    monkeypatch.setattr(LocalTrainer, "warm_up", warm_up)
    return tokens


@pytest.mark.parametrize("number", [0, 1], ids=["sft", "rl"])
def test_a_run_that_was_warmed_up_is_the_run_without_it(
    tiny_recipe: dict[str, Any], tmp_path: Path, rehearsed: list[int], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """And on a CPU nothing is warmed up at all."""
    heard: list[str] = []
    listeners = Listeners(doing=lambda what, how_far: heard.append(f"{what}, {how_far}"))
    cold = run(make_stage(tiny_recipe, tmp_path / "cold", number, listeners))
    assert rehearsed == []
    assert heard == []
    monkeypatch.setattr(warm, "pick_device", lambda asked: torch.device("cuda"))
    warmed = run(make_stage(tiny_recipe, tmp_path / "warm", number, listeners))
    assert len(rehearsed) == 1
    assert heard[0] == f"compiling kernels, a microbatch of {rehearsed[0]} tokens"
    assert [report.metrics for report in cold[0]] == [report.metrics for report in warmed[0]]
    assert [name for name in cold[1] if not torch.equal(cold[1][name], warmed[1][name])] == []
    assert warmed[0][0].seconds["warm_up"] > 0
    assert "warm_up" not in warmed[0][1].seconds


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_largest_microbatch_that_does_not_fit_is_a_doubt_and_no_end(
    tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: LocalTrainer, rows: list[Sample]) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(LocalTrainer, "warm_up", full)
    doubts: list[str] = []
    stage = make_stage(tiny_recipe, tmp_path, 1, Listeners(warn=doubts.append))
    asyncio.run(warm.warm_up(stage, 1))
    assert any("lower trainer.tokens_per_microbatch" in doubt for doubt in doubts)


def test_rows_are_those_of_the_largest_planned_microbatch(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    stage = make_stage(tiny_recipe, tmp_path, 1, Listeners())
    work = workload_of(stage.config, stage.objective, stage.data, stage.origin)
    rows = warm.planned_rows(stage, work)
    assert len(rows) == 16, "four groups of four fit into one microbatch"
    assert {len(row.token_ids) for row in rows} == {work.row_tokens}
    assert {row.num_actions for row in rows} == {4}
    assert len({row.group_id for row in rows}) == 4


def test_an_engine_expects_all_held_out_prompts_at_once_and_else_what_a_step_draws(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    with_held_out = make_stage(tiny_recipe, tmp_path / "a", 1, Listeners(), engine={"max_running": 100})
    del tiny_recipe["heldout"]
    rollout = {"groups_per_step": 4, "group_size": 4, "max_staleness": 1}
    without = make_stage(tiny_recipe, tmp_path / "b", 1, Listeners(), rollout=rollout, evaluation={"every": 0})
    expected = []
    for stage in (with_held_out, without):
        work = workload_of(stage.config, stage.objective, stage.data, stage.origin)
        expected.append(warm.expected_requests(stage, work))
    assert [requests.num_rows for requests in expected] == [100, 32]
    assert [requests.num_prompts for requests in expected] == [4, 8]
    assert expected[0].longest == with_held_out.data.longest_prompt + 4
