"""Over-sampling: more groups are under way than a step needs, and the first that finish are trained.

Owns: how many, and what becomes of the rest. With max_staleness above 0 the rest goes on and is trained later. Without,
its tokens would be too old: it is cut, and drawn anew in a late step (late.py) with the random numbers that it had. The
same weights would draw the same answers, so cutting the long ones does not favour short ones. Refuses: order "draw".
"""

from __future__ import annotations

from temper.rollout.controls.control import Setting
from temper.rollout.controls.late import CatchingUp


class Oversample(CatchingUp):
    name = "oversample"

    def __init__(self, setting: Setting, *, factor: float = 1.25, patience: int = 16) -> None:
        super().__init__(setting, patience)
        if not factor > 1:
            raise self.refuse(f"starts factor={factor:g} times as many groups as a step needs. Use more than 1")
        if setting.order != "finished":
            raise self.refuse('trains the first groups that finish. Add rollout.order = "finished"')
        if 0 < setting.max_staleness < factor - 1:
            raise self.refuse(
                f"has factor={factor:g}, and rollout.max_staleness={setting.max_staleness} admits "
                f"{setting.max_staleness + 1} times groups_per_step. Use a smaller factor, or a larger max_staleness"
            )
        self._lead = int(factor * setting.groups_per_step)
        if self._lead == setting.groups_per_step:
            raise self.refuse(
                f"has factor={factor:g}, which is no group more than groups_per_step={setting.groups_per_step}. Use "
                f"factor = {1 + 1 / setting.groups_per_step:.3g} or more"
            )

    def lead(self) -> int | None:
        return self.setting.groups_per_step if self._rounds.is_late else self._lead

    def metrics(self) -> dict[str, float]:
        return {} if self.setting.max_staleness else super().metrics()
