"""From a configuration to objects. The only package that may import everything."""

from __future__ import annotations

from temper.build.agents import require_free_ports, require_functions
from temper.build.check import check_stage, check_stages
from temper.build.environments import Environments
from temper.build.full import explain_out_of_memory
from temper.build.memory import (
    PlanRequest,
    StagePlan,
    describe_peak,
    explain_misfit,
    plan_on_cpu,
    plan_stage,
    settle_for_cpu,
)
from temper.build.models import first_model, pick_device, pick_dtype
from temper.build.objective import doubts_about, resolve_objective, with_sampler_correction
from temper.build.plan import make_plan
from temper.build.routers import check_first_model
from temper.build.stage import Around, Listeners, Stage, build_stage, check_data

__all__ = [
    "Around",
    "Environments",
    "Listeners",
    "PlanRequest",
    "Stage",
    "StagePlan",
    "build_stage",
    "check_data",
    "check_first_model",
    "check_stage",
    "check_stages",
    "describe_peak",
    "doubts_about",
    "explain_misfit",
    "explain_out_of_memory",
    "first_model",
    "make_plan",
    "pick_device",
    "pick_dtype",
    "plan_on_cpu",
    "plan_stage",
    "require_free_ports",
    "require_functions",
    "resolve_objective",
    "settle_for_cpu",
    "with_sampler_correction",
]
