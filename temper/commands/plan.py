"""`temper plan`: bytes and seconds of every stage of a recipe on one GPU or many, before anything runs.

Owns: which GPU, and that a recipe that cannot fit is refused. Refuses: the sums (planning/).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group

from temper.build import (
    PlanRequest,
    StagePlan,
    check_stage,
    check_stages,
    explain_misfit,
    first_model,
    plan_stage,
)
from temper.commands.training.preflight import Later, OpenedStage
from temper.config import load_recipe
from temper.errors import UserError
from temper.models.tiny import counting_tokenizer
from temper.objectives import Objective
from temper.planning.gpus import GPUS, Gpu, find_gpu, this_gpu
from temper.planning.table import cluster_lines, needs_line, render_plan, settings_line
from temper.stages.kinds import kind_of
from temper.stages.reading.data import StageData, open_data

ROUGH_CHARACTERS = 4
"""Of one token, in prompts of a model whose tokenizer is not here: what English text has, roughly."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    stage: OpenedStage
    plan: StagePlan
    is_rough: bool
    """Whether prompts were measured without the model's tokenizer."""


def plan_recipe(
    recipe: Path, *, overrides: Sequence[str] = (), gpu: str = "", gpus: int = 1
) -> tuple[list[Group], list[str]]:
    """A table for each stage, and what to say of those that do not fit; no weights are read."""
    planned = plan_stages(recipe, overrides=overrides, gpu=gpu, gpus=gpus)
    misfits = [
        f"stage {each.stage.number} ({each.stage.config.stage}): {explain_misfit(each.plan)}"
        for each in planned
        if not each.plan.fits
    ]
    return [_render(each) for each in planned], misfits


def plan_stages(recipe: Path, *, overrides: Sequence[str] = (), gpu: str = "", gpus: int = 1) -> list[PlannedStage]:
    """The plan of every stage, in order."""
    where = pick_gpu(gpu)
    stages = load_recipe(recipe, overrides)
    check_stages(stages)
    with tempfile.TemporaryDirectory() as folder:
        later = Later(stages, first_model(stages[0], Path(folder), has_weights=False))
        opened = [_Readied.of(stage) for stage in map(later.open, stages)]
        plans = _plan_all(opened, where, gpus)
    return [
        PlannedStage(stage=each.stage, plan=plan, is_rough=not has_tokenizer(each.stage.model))
        for each, plan in zip(opened, plans, strict=True)
    ]


@dataclass(frozen=True)
class _Readied:
    """A stage and its data, to be planned in several ways."""

    stage: OpenedStage
    objective: Objective
    data: StageData

    @classmethod
    def of(cls, stage: OpenedStage) -> _Readied:
        objective = check_stage(stage.config)
        reading = kind_of(stage.config).reading
        tokenizer = None if has_tokenizer(stage.model) else counting_tokenizer(ROUGH_CHARACTERS)
        return cls(stage, objective, open_data(stage.readable, objective, reading, stage.model, tokenizer))

    def plan(self, gpu: Gpu, asked: PlanRequest) -> StagePlan:
        return plan_stage(self.stage.readable, self.objective, self.data, self.stage.model, gpu, asked)


def _plan_all(stages: Sequence[_Readied], gpu: Gpu, gpus: int) -> list[StagePlan]:
    """Trainers are started once for all stages: of what each stage would like best, what all of them together are
    fastest with. Where no such table suits all, every stage shows its own."""
    best = [stage.plan(gpu, PlanRequest(gpus=gpus)) for stage in stages]
    wishes = dict.fromkeys((plan.layout.trainers, plan.layout.parts) for plan in best)
    if len(wishes) == 1:
        return best
    together = [
        [stage.plan(gpu, PlanRequest(gpus=gpus, trainers=trainers, parts=parts)) for stage in stages]
        for trainers, parts in wishes
    ]
    # A stage that may not be cut keeps copies, whatever it is asked for: then this is no table that suits all.
    fitting = [
        plans
        for plans, wish in zip(together, wishes, strict=True)
        if all(plan.fits and (plan.layout.trainers, plan.layout.parts) == wish for plan in plans)
    ]

    def seconds(plans: Sequence[StagePlan]) -> float:
        return sum(plan.time.total * stage.stage.config.steps for plan, stage in zip(plans, stages, strict=True))

    return min(fitting, key=seconds, default=best)


def pick_gpu(name: str) -> Gpu:
    """By name, or this machine's."""
    found = find_gpu(name) if name else this_gpu()
    if found is None:
        raise UserError(
            f"this machine has no GPU, and on a CPU nothing is planned. Name one with --gpu: {', '.join(GPUS)}"
        )
    return found


def has_tokenizer(model: Path) -> bool:
    return any((model / name).is_file() for name in TOKENIZER_FILES)


def _render(planned: PlannedStage) -> Group:
    stage, plan = planned.stage, planned.plan
    many = f"{plan.layout.gpus} x " if plan.layout.gpus > 1 else ""
    where = f"{many}{plan.gpu.name} ({plan.gpu.usable_bytes / 2**30:.1f} GiB)"
    lines = [settings_line(plan.work, plan.chosen), needs_line(plan.memory, plan.gpu)]
    lines += cluster_lines(plan.layout, plan.work, plan.time, plan.reason)
    if planned.is_rough:
        lines.append(
            f"{stage.model} has no tokenizer: {ROUGH_CHARACTERS} characters of a prompt are counted as a token"
        )
    return render_plan(
        f"stage {stage.number}: {stage.config.stage}, on {where}", plan.work, plan.memories, plan.time, lines
    )
