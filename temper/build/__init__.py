"""From a configuration to objects. The only package that may import everything."""

from __future__ import annotations

from temper.build.plan import make_plan
from temper.build.stage import Stage, build_stage, first_model, pick_device, pick_dtype, resolve_objective

__all__ = ["Stage", "build_stage", "first_model", "make_plan", "pick_device", "pick_dtype", "resolve_objective"]
