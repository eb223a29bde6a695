"""The controls by name, and how a recipe's list of them is read.

Owns: names, options, combinations that make no sense. Refuses: what each of them does (its own file).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from temper.errors import UserError
from temper.plugins import require_options, split_named
from temper.rollout.controls.concurrency import Concurrency
from temper.rollout.controls.control import Control, Setting
from temper.rollout.controls.oversample import Oversample
from temper.rollout.controls.partial import Partial
from temper.rollout.controls.tail import Tail
from temper.rollout.controls.together import Controls
from temper.types import Scalar

CONTROLS: dict[str, type[Control]] = {control.name: control for control in (Oversample, Partial, Tail, Concurrency)}


def read_controls(tables: Sequence[str | Mapping[str, Scalar]], setting: Setting) -> Controls:
    """From a recipe's rollout.controls: names, or tables such as {name = "oversample", factor = 1.5}."""
    controls = [_read(table, setting) for table in tables]
    names = [control.name for control in controls]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f'rollout.controls: "{twice}" is there twice. Name it once')
    late = [control.name for control in controls if control.puts_off]
    if len(late) > 1:
        raise UserError(
            f"rollout.controls: {' and '.join(late)} both put groups off, each in steps of its own. Use one"
        )
    if setting.order == "finished" and setting.max_staleness == 0 and not late:
        raise UserError(
            'rollout.order="finished" with rollout.max_staleness=0: a synchronous step starts as many groups as it '
            "needs and waits for all of them, so nobody can be overtaken. Use max_staleness = 1 or more, add "
            'controls = ["oversample"] or ["tail"], or leave order out'
        )
    return Controls(controls)


def _read(table: str | Mapping[str, Scalar], setting: Setting) -> Control:
    example = 'controls = ["partial", {name = "oversample", factor = 1.5}]'
    name, options = split_named(table, CONTROLS, where="rollout.controls:", example=example)
    require_options(CONTROLS[name], options, where=f"rollout.controls: {name}", skip=1)
    return CONTROLS[name](setting, **options)
