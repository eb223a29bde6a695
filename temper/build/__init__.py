"""From a configuration to objects. The only package that may import everything."""

from __future__ import annotations

from temper.build.models import first_model, pick_device, pick_dtype
from temper.build.objective import doubts_about, require_turn_credit, resolve_objective
from temper.build.plan import make_plan
from temper.build.stage import Stage, build_stage, check_stage, env_maker
from temper.build.trial import Trial, try_rows

__all__ = [
    "Stage",
    "Trial",
    "build_stage",
    "check_stage",
    "doubts_about",
    "env_maker",
    "first_model",
    "make_plan",
    "pick_device",
    "pick_dtype",
    "require_turn_credit",
    "resolve_objective",
    "try_rows",
]
