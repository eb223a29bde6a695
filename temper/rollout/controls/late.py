"""Draws that were put off, and the steps that catch up on them.

Owns: when such a step comes and who starts in it. In an ordinary step nobody starts who was put off; in a late one they
go first, and nobody is put off. Every draw is so trained once an epoch, however slow it is. Refuses: who is put off
(oversample.py, tail.py).
"""

from __future__ import annotations

from temper.rollout.controls.control import Control, Setting, State
from temper.types import Scalar


class LateRounds:
    def __init__(self, groups_per_step: int, patience: int) -> None:
        self._groups_per_step, self._patience = groups_per_step, patience
        self._version = 0
        self._put_off: dict[int, int] = {}
        """Draws that wait, with the version at which they were put off."""
        self.is_late = False
        """Whether the step that is being filled catches up."""

    @property
    def num_waiting(self) -> int:
        return len(self._put_off)

    def begin(self, version: int) -> None:
        """A late step comes when enough wait to fill one, or one has waited for `patience` steps."""
        self._version = version
        oldest = min(self._put_off.values(), default=version)
        self.is_late = len(self._put_off) >= self._groups_per_step or version - oldest >= self._patience

    def put_off(self, draw: int) -> None:
        self._put_off[draw] = self._version

    def may_start(self, draw: int) -> bool:
        if not self.is_late:
            return draw not in self._put_off
        return draw in self._put_off or not self._put_off

    def started(self, draw: int) -> None:
        self._put_off.pop(draw, None)

    def state(self) -> dict[str, Scalar | list[Scalar]]:
        return {"draws": [*self._put_off], "versions": [*self._put_off.values()]}

    def load_state(self, state: State) -> None:
        draws, versions = state["draws"], state["versions"]
        assert isinstance(draws, list), "a list of numbers"
        assert isinstance(versions, list), "a list of numbers"
        self._put_off = {int(draw): int(version) for draw, version in zip(draws, versions, strict=True)}


class CatchingUp(Control):
    """A control that gives draws back and catches up on them."""

    puts_off = True

    def __init__(self, setting: Setting, patience: int) -> None:
        super().__init__(setting)
        if patience < 1:
            raise self.refuse(f"has patience={patience}: a group that was put off waits for 1 step or more")
        self._rounds = LateRounds(setting.groups_per_step, patience)
        self._num_put_off = 0

    def begin(self, version: int) -> None:
        self._rounds.begin(version)

    def may_start(self, draw: int) -> bool:
        return self._rounds.may_start(draw)

    def started(self, draw: int) -> None:
        self._rounds.started(draw)

    def put_off(self, draw: int) -> None:
        self._rounds.put_off(draw)
        self._num_put_off += 1

    def metrics(self) -> dict[str, float]:
        put_off, self._num_put_off = self._num_put_off, 0
        return {
            "flow/cut": float(put_off),
            "flow/put_off": float(self._rounds.num_waiting),
            "flow/late_step": float(self._rounds.is_late),
        }

    def state(self) -> dict[str, Scalar | list[Scalar]]:
        return self._rounds.state()

    def load_state(self, state: State) -> None:
        self._rounds.load_state(state)
