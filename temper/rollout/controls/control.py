"""What a control of sampling may do. A control is a small class in a file of its own and an entry in registry.py.

Owns: the hooks, which do nothing by default, and what every control is told about its stage. Refuses: rolling
(source.py), the staleness bound (buffer.py): no control can break it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from temper.errors import BackendError, UserError
from temper.protocols import Sampler
from temper.rollout.buffer import StepGroups
from temper.rollout.orders import OrderName
from temper.types import Scalar

State = Mapping[str, Scalar | list[Scalar]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The stage that a control acts in."""

    groups_per_step: int
    max_staleness: int
    order: OrderName
    decode: Callable[[Sequence[int]], str] | None = None
    """Text of token ids. None: requests have no stop texts."""
    pressure: Callable[[], Mapping[str, float]] = dict
    """What the sampler counted during the last step (protocols.Sampler.stats); empty before the first."""


class PutOff(BackendError):
    """Raised by a control's sampler: this group is given back and drawn anew later."""


class Control:
    """One way to control what is sampled. A subclass has a name and overrides what it acts on."""

    name: ClassVar[str]
    puts_off: ClassVar[bool] = False
    """Whether it gives draws back that are trained in a later step: they are overtaken."""

    def __init__(self, setting: Setting) -> None:
        """Options of a recipe are keyword parameters of a subclass. UserError: it cannot act in this stage."""
        self.setting = setting

    def refuse(self, problem: str) -> UserError:
        return UserError(f'rollout.controls: "{self.name}" {problem}')

    def begin(self, version: int) -> None:
        """Weights of this version are live, and the step that trains on them begins. Before the first step, too."""

    def lead(self) -> int | None:
        """Groups that may be under way for the next step, finished ones included. None: what the bound admits."""
        return None

    def most_running(self) -> int | None:
        """Groups that may run at once. None: no limit of its own."""
        return None

    def may_start(self, draw: int) -> bool:
        """Whether this draw may start in the step that is being filled."""
        return True

    def started(self, draw: int) -> None:
        pass

    def wrap(self, draw: int, sampler: Sampler) -> Sampler:
        """What this draw's requests go through."""
        return sampler

    def put_off(self, draw: int) -> None:
        """The draw was given back unfinished, and waits to be started again."""

    async def filled(self, taken: StepGroups, num_queued: int) -> None:
        """A step is full and about to be trained; `num_queued` more groups are finished."""

    def metrics(self) -> dict[str, float]:
        """What it did since the last call, by names under flow/."""
        return {}

    def state(self) -> dict[str, Scalar | list[Scalar]]:
        """What a checkpoint needs for it to go on as before."""
        return {}

    def load_state(self, state: State) -> None:
        pass
