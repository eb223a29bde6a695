"""From a configuration to objects. The only package that may import everything."""

from __future__ import annotations

from temper.build.check import check_stage, check_stages
from temper.build.models import first_model, pick_device, pick_dtype
from temper.build.objective import doubts_about, resolve_objective, with_sampler_correction
from temper.build.plan import make_plan
from temper.build.stage import Listeners, Stage, build_stage, check_data, env_maker

__all__ = [
    "Listeners",
    "Stage",
    "build_stage",
    "check_data",
    "check_stage",
    "check_stages",
    "doubts_about",
    "env_maker",
    "first_model",
    "make_plan",
    "pick_device",
    "pick_dtype",
    "resolve_objective",
    "with_sampler_correction",
]
