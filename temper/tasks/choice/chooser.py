"""What a chooser is: one reason why a prompt is drawn now, later, or not again.

Owns: what choosers may ask and answer. Refuses: the choosers (one file each), and looking for prompts (stream.py).
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from temper.types import Group, PromptHistory, Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One prompt that a draw comes upon. Chance is a pure function of its fields: a resumed run meets the same."""

    seed: int
    draw: int
    number: int
    """How many prompts this draw came upon before."""
    history: PromptHistory | None
    """None: never seen."""

    def chance(self, chooser: str) -> float:
        """Uniform in [0, 1), for this prompt at this draw."""
        return random.Random(f"{self.seed}/choose/{chooser}/{self.draw}/{self.number}").random()

    def chance_of_draw(self, chooser: str) -> float:
        """Uniform in [0, 1), the same for every prompt that this draw comes upon."""
        return random.Random(f"{self.seed}/choose/{chooser}/{self.draw}").random()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """What a chooser knows of its stage."""

    sources: tuple[str, ...]
    """Names of the sources, in the order of their weights."""
    weights: tuple[float, ...]
    """The recipe's."""
    steps: int
    """Of the stage."""


class Chooser:
    """Overrides what it has a say in; the rest lets every prompt pass. Its arguments are what a recipe may set."""

    name: str
    goes_by_prompt: bool = True
    """Whether it reads histories of single prompts, so that it needs prompts that come back."""

    def open(self, facts: StageFacts) -> None:
        """Called once, before anything else. Raises UserError for a stage in which it has nothing to do."""

    def look_around(self, known: Collection[PromptHistory], step: int) -> None:
        """What is known before the draws that follow a step; 0: before the first. `known`: without prompts that another
        chooser has put out. Must need nothing but this, so that a resumed run finds the same."""

    def is_out(self, history: PromptHistory) -> bool:
        """Whether a prompt is not drawn, whatever else there is. By its history alone, never by chance: it holds until
        a step is consumed."""
        return False

    def wants(self, look: Look) -> bool:
        """False: others first. Such a prompt is drawn where nothing is found that all choosers want."""
        return True

    def weights(self) -> Sequence[float] | None:
        """Weights of the sources for the next draws; None: no opinion."""
        return None

    def learn(self, groups: Sequence[Group], before: Mapping[str, PromptHistory]) -> dict[str, float]:
        """A step has consumed these groups, in draw order; `before` has the histories that their prompts had. Returns
        metrics."""
        return {}

    def measure(self) -> dict[str, float]:
        """Metrics of what it knows after a step."""
        return {}

    def state(self) -> dict[str, Scalar]:
        """What a checkpoint must hold beside the histories."""
        return {}

    def load_state(self, state: Mapping[str, Scalar]) -> None:
        """Continues where state() was taken."""
