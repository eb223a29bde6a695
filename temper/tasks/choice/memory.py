"""What a stage remembers of its prompts, and what its choosers make of it.

Owns: the order in which choosers hear of a step, what draws came to that no step has consumed yet, and their part of a
checkpoint. Histories change when a step consumes groups and at no other time: draws of one step see one memory, and a
synchronous run that is resumed draws what it would have drawn. Refuses: looking for a prompt (stream.py).
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import cast

from temper.tasks.choice.chooser import Chooser, Look, StageFacts
from temper.tasks.choice.histories import Histories, RateRules
from temper.types import Group, PromptHistory, Scalar

HISTORIES, STEP, CHOOSERS, DRAWN = "prompt histories", "prompt histories step", "choosers", "chosen draws"
"""Names of its parts of a state, beside those of the task stream."""

State = Mapping[str, Scalar | list[Scalar]]


@dataclass(frozen=True, slots=True)
class ChosenDraw:
    """What a draw came to. By the histories of its moment: afterwards nobody could find it again."""

    source: int
    index: int
    """Of its task in that source."""
    positions: tuple[int, ...]
    """Of the stream in all sources, after it."""


class PromptMemory:
    """Histories and choosers of one stage."""

    def __init__(
        self,
        choosers: Sequence[Chooser] = (),
        facts: StageFacts | None = None,
        *,
        rules: RateRules = RateRules(),
        passing: Collection[str] = (),
    ) -> None:
        """`passing`: names of sources without end, whose prompts never come back. Choosers need their facts."""
        assert facts is not None or not choosers, "choosers are opened with what they know of their stage"
        self.choosers = tuple(choosers)
        self.histories = Histories(rules, passing)
        self.step = 0
        """Last step that was consumed."""
        self.num_looks = self.num_skips = 0
        """Prompts that draws came upon since that step, and those of them that they passed over."""
        self._drawn: dict[int, ChosenDraw] = {}
        """From the first draw that no step has consumed on."""
        self._consumed: set[int] = set()
        """Those among them that a step has consumed."""
        self._drawing = threading.Lock()
        """A checkpoint reads draws from a thread of its own."""
        self._out: dict[str, list[str]] = {}
        """Prompts that are out, and the choosers that put them out."""
        for chooser in choosers:
            assert facts is not None, "asserted above"
            chooser.open(facts)
        self._look_around(())

    def wants(self, look: Look) -> bool:
        """Whether all choosers want a prompt that is not out."""
        return all(chooser.wants(look) for chooser in self.choosers)

    def weights(self) -> Sequence[float] | None:
        """Weights of the sources for the next draws; None: the recipe's."""
        said = (chooser.weights() for chooser in self.choosers)
        return next((weights for weights in said if weights is not None), None)

    def note(self, draw: int, chosen: ChosenDraw) -> None:
        """Remembers a draw until it and all before it are consumed."""
        with self._drawing:
            self._drawn[draw] = chosen

    def recall(self, draw: int) -> ChosenDraw | None:
        """What a draw came to before a resume, when it, or one before it, was not consumed yet."""
        return self._drawn.get(draw)

    def learn(self, step: int, groups: Iterable[Group]) -> tuple[tuple[PromptHistory, ...], dict[str, float]]:
        """A step has consumed these groups: the new histories of their prompts, and metrics."""
        consumed = sorted(groups, key=lambda group: group.draw)
        before = {group.task.id: known for group in consumed if (known := self.histories.get(group.task.id))}
        changed = self.histories.update(step, consumed)
        self.step = step
        self._forget(group.draw for group in consumed)
        metrics = {"data/skipped_share": self.num_skips / max(1, self.num_looks)} if self.choosers else {}
        self.num_looks = self.num_skips = 0
        for chooser in self.choosers:
            metrics |= chooser.learn(consumed, before)
        self._look_around(changed)
        for chooser in self.choosers:
            metrics |= chooser.measure()
        return changed, metrics | self._measure()

    @property
    def out(self) -> Mapping[str, Sequence[str]]:
        """Prompts that are not drawn again, and the choosers that have put them out."""
        return self._out

    def state(self) -> dict[str, Scalar | list[Scalar]]:
        states = {chooser.name: chooser.state() for chooser in self.choosers}
        with self._drawing:
            drawn = [json.dumps([draw, *astuple(one), draw in self._consumed]) for draw, one in self._drawn.items()]
        return {HISTORIES: [*self.histories.state()], STEP: self.step, CHOOSERS: json.dumps(states), DRAWN: [*drawn]}

    def load_state(self, state: State) -> None:
        states = json.loads(str(state.get(CHOOSERS, "{}")))
        self.histories.load_state(cast(list[str], state.get(HISTORIES, [])))
        self.step = cast(int, state.get(STEP, 0))
        for chooser in self.choosers:
            chooser.load_state(states.get(chooser.name, {}))
        drawn = [json.loads(line) for line in cast(list[str], state.get(DRAWN, []))]
        self._drawn = {draw: ChosenDraw(source, index, tuple(after)) for draw, source, index, after, _ in drawn}
        self._consumed = {draw for draw, *_, is_consumed in drawn if is_consumed}
        self._out = {}
        self._look_around(self.histories)

    def _forget(self, draws: Iterable[int]) -> None:
        """These are consumed. Nobody asks for a draw again when all before it are, too."""
        with self._drawing:
            self._consumed |= self._drawn.keys() & set(draws)
            first = min(self._drawn.keys() - self._consumed, default=math.inf)
            self._drawn = {draw: one for draw, one in self._drawn.items() if draw >= first}
            self._consumed &= self._drawn.keys()

    def _look_around(self, changed: Iterable[PromptHistory]) -> None:
        """`changed`: prompts whose histories are others than when this was last called."""
        for history in changed if self.choosers else ():
            names = [chooser.name for chooser in self.choosers if chooser.is_out(history)]
            self._out.pop(history.task_id, None)
            self._out |= {history.task_id: names} if names else {}
        for chooser in self.choosers:
            others = {name for name, by in self._out.items() if any(one != chooser.name for one in by)}
            known = [history for history in self.histories if history.task_id not in others]
            chooser.look_around(known, self.step)

    def _measure(self) -> dict[str, float]:
        rates = [history.rate for history in self.histories if history.rate is not None]
        if not rates:
            return {}
        return {"data/prompts_known": float(len(self.histories)), "data/prompts_pass_rate": sum(rates) / len(rates)}
