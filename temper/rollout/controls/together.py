"""All controls of a stage as one.

Owns: what holds when several have a say (the strictest), and their state under their names. Refuses: reading a recipe
(registry.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from temper.protocols import Sampler
from temper.rollout.buffer import StepGroups
from temper.rollout.controls.control import Control, State
from temper.types import Scalar

PREFIX = "control "
"""Before the name of a control in a checkpoint of its source."""


class Controls:
    def __init__(self, controls: Sequence[Control] = ()) -> None:
        self.all = tuple(controls)

    def begin(self, version: int) -> None:
        for control in self.all:
            control.begin(version)

    def lead(self) -> int | None:
        return _least(control.lead() for control in self.all)

    def most_running(self) -> int | None:
        return _least(control.most_running() for control in self.all)

    def may_start(self, draw: int) -> bool:
        return all(control.may_start(draw) for control in self.all)

    def started(self, draw: int) -> None:
        for control in self.all:
            control.started(draw)

    def wrap(self, draw: int, sampler: Sampler) -> Sampler:
        for control in self.all:
            sampler = control.wrap(draw, sampler)
        return sampler

    def put_off(self, draw: int) -> None:
        for control in self.all:
            control.put_off(draw)

    async def filled(self, taken: StepGroups, num_queued: int) -> None:
        for control in self.all:
            await control.filled(taken, num_queued)

    def metrics(self) -> dict[str, float]:
        return {name: value for control in self.all for name, value in control.metrics().items()}

    def state(self) -> dict[str, Scalar | list[Scalar]]:
        return {f"{PREFIX}{c.name}/{key}": value for c in self.all for key, value in c.state().items()}

    def load_state(self, state: State) -> None:
        """A control that the checkpoint does not know starts as if new."""
        for control in self.all:
            own = f"{PREFIX}{control.name}/"
            if found := {name.removeprefix(own): value for name, value in state.items() if name.startswith(own)}:
                control.load_state(found)


def _least(numbers: Iterable[int | None]) -> int | None:
    return min((number for number in numbers if number is not None), default=None)
