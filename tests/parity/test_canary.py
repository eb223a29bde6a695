"""The canary in a running loop sees every publication and disturbs nothing; nothing of old weights survives one."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from temper import loop
from temper.build import Stage, build_stage, first_model, make_plan
from temper.config import RunConfig, resolve
from temper.engine.local.engine import LocalEngine
from temper.errors import BackendError
from temper.parity.budgets import Budget
from temper.parity.check import Canary, Sides, canary_prompts, prove_parity, stale_tensors
from temper.types import (
    Batch,
    Completion,
    EvaluationResult,
    Publication,
    Request,
    SamplingParams,
    StepReport,
)

BUDGET = Budget(mean_gap=1e-5, max_gap=1e-3)


class Notes:
    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self.evaluations: list[EvaluationResult] = []

    def append(self, report: StepReport, batch: Batch) -> None:
        self.reports.append(report)

    def evaluation(self, result: EvaluationResult) -> None:
        self.evaluations.append(result)


class WatchedSampler:
    """The loop's sampler, with a canary at the end of every load but the first: there are no rows to learn from yet."""

    def __init__(self, stage: Stage, every: int) -> None:
        self._stage, self._every = stage, every
        self._canary: Canary | None = None
        self.versions: list[int] = []
        self.gaps: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage.sampler, name)

    async def load(self, publication: Publication) -> None:
        stage = self._stage
        await stage.sampler.load(publication)
        if self._canary is None:
            held = dict(stage.sampler._model.named_parameters())
            sides = Sides(
                sampler=stage.sampler, recompute=stage.trainer.score, params=stage.setup.params, budget=BUDGET,
                find_stale=lambda: stale_tensors(stage.trainer.publish().tensors, held),
            )  # fmt: skip
            _, rows = await prove_parity(stage.setup, stage.data.probe[:8], sides, name="opening")
            self._canary = Canary(sides, canary_prompts(rows), name="canary", every=self._every)
            return
        agreement = await self._canary.check(publication.version)
        if agreement is not None:
            self.versions.append(publication.version)
            self.gaps.append(agreement.mean_gap)


def rl_config(recipe: dict[str, Any], **changes: Any) -> RunConfig:
    recipe = copy.deepcopy(recipe)
    recipe["stage"] = [{**recipe["stage"][1], **changes}]
    return resolve(recipe, [], where="test")[0]


def run(config: RunConfig, folder: Path, every: int | None) -> tuple[Notes, list[torch.Tensor], WatchedSampler]:
    """A whole run; `every`: of the canary, None: without one."""
    folder.mkdir(parents=True, exist_ok=True)
    notes = Notes()

    async def go() -> tuple[list[torch.Tensor], WatchedSampler]:
        stage = build_stage(config, 0, first_model(config, folder))
        watched = WatchedSampler(stage, every or 0)
        plan = make_plan(stage, first_step=1, recorders=(notes,), checkpoint=lambda step: None)
        await loop.run(plan if every is None else dataclasses.replace(plan, sampler=watched))
        await stage.close()
        return [parameter.detach().clone() for parameter in stage.model.parameters()], watched

    weights, watched = asyncio.run(go())
    return notes, weights, watched


def test_training_is_the_same_to_the_bit_with_and_without_a_canary(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    # Blocks of two tokens: were prompts of the canary starts of training prompts, the prefix cache would tell.
    config = rl_config(tiny_recipe, steps=4)
    plain, weights, _ = run(config, tmp_path / "plain", every=None)
    checked, weights_checked, watched = run(config, tmp_path / "checked", every=1)
    assert watched.versions == [1, 2, 3, 4]
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_checked, strict=True))
    assert [report.metrics for report in plain.reports] == [report.metrics for report in checked.reports]
    assert plain.evaluations == checked.evaluations


def test_the_canary_checks_every_nth_publication_also_while_rollouts_run(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    rollout = {"groups_per_step": 4, "group_size": 4, "max_staleness": 2}
    _, _, watched = run(rl_config(tiny_recipe, steps=5, rollout=rollout), tmp_path, every=2)
    assert watched.versions == [2, 4]
    assert max(watched.gaps) < BUDGET.mean_gap


def test_a_publication_that_loses_a_tensor_ends_the_run_and_names_it(
    tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    sound = LocalEngine.load

    async def lossy(self: LocalEngine, publication: Publication) -> None:
        held = dict(self._model.named_parameters())[name].detach().clone()
        await sound(self, Publication(version=publication.version, tensors={**publication.tensors, name: held}))

    monkeypatch.setattr(LocalEngine, "load", lossy)
    # With staleness the engine has weights of its own.
    config = rl_config(tiny_recipe, steps=3, rollout={"groups_per_step": 2, "group_size": 4, "max_staleness": 1})
    with pytest.raises(BackendError, match=rf"weights version \d: .*stale tensor, {name}"):
        run(config, tmp_path, every=1)


@pytest.mark.heavy
def test_learning_rate_zero_leaves_weights_scores_and_agreement_as_they_were_for_fifty_steps(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    config = rl_config(
        tiny_recipe, steps=50, optim={"learning_rate": 0.0}, rollout={"groups_per_step": 2, "group_size": 2},
        evaluation={"every": 0},
    )  # fmt: skip
    notes, weights, watched = run(config, tmp_path, every=10)
    untouched = build_stage(config, 0, tmp_path / "model").model
    assert all(torch.equal(a, b) for a, b in zip(weights, untouched.parameters(), strict=True))
    greedy = [(result.step, result.score) for result in notes.evaluations if result.name == "greedy"]
    assert [step for step, _ in greedy] == [0, 50]
    assert greedy[0][1] == greedy[1][1]
    assert len(notes.reports) == 50
    for report in notes.reports:
        assert report.metrics["policy/ratio_mean"] == report.metrics["policy/ratio_max"] == 1.0
        assert report.metrics["mismatch/logp_abs_max"] < 1e-5
        assert report.metrics["mismatch/kl_k3"] < 1e-9
    assert watched.versions == [10, 20, 30, 40, 50]
    assert max(watched.gaps) < 1e-6


def test_nothing_of_scrambled_weights_survives_the_publication_of_the_right_ones(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    config = rl_config(tiny_recipe, rollout={"max_staleness": 1})

    async def go() -> tuple[list[Completion], list[Completion], list[Completion]]:
        stage = build_stage(config, 0, first_model(config, tmp_path))
        right = stage.trainer.publish()
        generator = torch.Generator().manual_seed(0)
        scrambled = {
            name: tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view(tensor.shape)
            for name, tensor in right.tensors.items()
        }
        before = await complete(stage.sampler)
        await stage.sampler.load(Publication(version=1, tensors=scrambled))
        between = await complete(stage.sampler)
        await stage.sampler.load(Publication(version=2, tensors=right.tensors))
        after = await complete(stage.sampler)
        await stage.close()
        return before, between, after

    before, between, after = asyncio.run(go())
    assert [c.token_ids for c in before] != [c.token_ids for c in between]
    assert not {x for c in before for x in c.logprobs} & {x for c in between for x in c.logprobs}
    assert [(c.token_ids, c.logprobs) for c in before] == [(c.token_ids, c.logprobs) for c in after]
    assert {version for c in after for version in c.versions} == {2}


async def complete(sampler: LocalEngine) -> list[Completion]:
    """Groups that share a prompt, and a second turn that goes on where a first one ended."""
    params = SamplingParams(max_new_tokens=6)
    first = [Request(id=f"first/{k}", prompt_ids=(5, 6, 7, 8, 9, 10), params=params) for k in range(3)]
    answers = await asyncio.gather(*(sampler.generate(request) for request in first))
    second = [
        Request(id=f"second/{k}", prompt_ids=(*first[k].prompt_ids, *answer.token_ids, 11, 12), params=params)
        for k, answer in enumerate(answers)
    ]
    return [*answers, *await asyncio.gather(*(sampler.generate(request) for request in second))]
