"""`temper plan`: bytes and seconds of every stage of a recipe on a GPU, before anything runs.

Owns: which GPU, and that a recipe that cannot fit is refused. Refuses: the sums (planning/).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group

from temper.build import StagePlan, check_stage, check_stages, explain_misfit, first_model, plan_stage
from temper.commands.training.preflight import Later, OpenedStage
from temper.config import load_recipe
from temper.errors import UserError
from temper.planning.gpus import GPUS, Gpu, find_gpu, this_gpu
from temper.planning.table import render_plan
from temper.stages.kinds import kind_of
from temper.stages.reading.data import open_data


def plan_recipe(recipe: Path, *, overrides: Sequence[str] = (), gpu: str = "") -> tuple[list[Group], list[str]]:
    """A table for each stage, and what to say of those that do not fit; no weights are read."""
    where = pick_gpu(gpu)
    stages = load_recipe(recipe, overrides)
    check_stages(stages)
    with tempfile.TemporaryDirectory() as folder:
        later = Later(stages, first_model(stages[0], Path(folder)))
        plans = [(opened, plan_opened(opened, where)) for opened in map(later.open, stages)]
    tables = [_render(opened, plan) for opened, plan in plans]
    misfits = [
        f"stage {opened.number} ({opened.config.stage}): {explain_misfit(plan)}"
        for opened, plan in plans
        if not plan.fits
    ]
    return tables, misfits


def pick_gpu(name: str) -> Gpu:
    """By name, or this machine's."""
    found = find_gpu(name) if name else this_gpu()
    if found is None:
        raise UserError(
            f"this machine has no GPU, and on a CPU nothing is planned. Name one with --gpu: {', '.join(GPUS)}"
        )
    return found


def plan_opened(stage: OpenedStage, gpu: Gpu) -> StagePlan:
    objective = check_stage(stage.config)
    data = open_data(stage.readable, objective, kind_of(stage.config).reading, stage.model)
    return plan_stage(stage.readable, objective, data, stage.model, gpu)


def _render(stage: OpenedStage, plan: StagePlan) -> Group:
    title = f"stage {stage.number}: {stage.config.stage}, on {plan.gpu.name} ({plan.gpu.usable_bytes / 2**30:.1f} GiB)"
    return render_plan(title, plan.work, plan.chosen, (plan.gpu, plan.memory, plan.time))
