"""How often each prompt was solved, in words: for data in which no group tells answers apart.

Owns: the account by prompt, and which key to change. Refuses: deciding that a run ends (rollout/buffer.py, alarms/).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from temper.types import Group

SOLVED, FAILED = 1.0, 0.0
"""Rewards of a right and of a wrong answer."""
MOST_NAMED = 3
"""Prompts named at either end."""


@dataclass(slots=True)
class _Prompt:
    total: float = 0.0
    answers: int = 0
    lowest: float = float("inf")
    highest: float = float("-inf")

    @property
    def mean(self) -> float:
        return self.total / self.answers

    @property
    def kind(self) -> str:
        if self.lowest >= SOLVED:
            return "right"
        return "wrong" if self.highest <= FAILED else "between"


@dataclass(slots=True)
class PassRates:
    """Rewards of answers, prompt by prompt. Holds four numbers for each."""

    _prompts: dict[str, _Prompt] = field(default_factory=dict)
    _is_between: bool = False
    """Whether a reward was neither that of a right answer nor that of a wrong one."""

    @staticmethod
    def of(groups: Iterable[Group]) -> PassRates:
        rates = PassRates()
        for group in groups:
            rates.add(group.task.id, group.rewards)
        return rates

    def add(self, task_id: str, rewards: Iterable[float]) -> None:
        for reward in rewards:
            prompt = self._prompts.setdefault(task_id, _Prompt())
            prompt.total += reward
            prompt.answers += 1
            prompt.lowest, prompt.highest = min(prompt.lowest, reward), max(prompt.highest, reward)
            self._is_between |= reward not in (SOLVED, FAILED)

    def describe(self) -> str:
        """How many prompts were all right and all wrong, and the rates of the hardest and the easiest; "": of none."""
        if not self._prompts:
            return ""
        answers = sum(prompt.answers for prompt in self._prompts.values())
        counts = {kind: self._count(kind) for kind in ("wrong", "right", "between")}
        said = [f"{counts['wrong']} all wrong", f"{counts['right']} all right"]
        said += [f"{counts['between']} neither"] if counts["between"] else []
        what = "Mean rewards" if self._is_between else "Pass rates"
        return (
            f"{answers} answers to {len(self._prompts)} prompts: {', '.join(said)}. {what} by prompt: {self._named()}"
        )

    def advise(self) -> str:
        """The key to change, by what most prompts have in common."""
        most = max(("wrong", "right", "between"), key=self._count)
        return {
            "wrong": (
                "Most prompts are too hard for this policy: easier tasks in [[train]], partial credit in [[reward]], a "
                'larger rollout.group_size, or a stage of kind "sft" before this one'
            ),
            "right": "Most prompts are solved already: harder tasks in [[train]]",
            "between": "The reward does not tell answers apart: another [[reward]], or one more part of it",
        }[most]

    def _count(self, kind: str) -> int:
        return sum(prompt.kind == kind for prompt in self._prompts.values())

    def _named(self) -> str:
        """The lowest and the highest; all where they are few."""
        ordered = sorted(self._prompts.items(), key=lambda item: (item[1].mean, item[0]))
        ends = ordered if len(ordered) <= 2 * MOST_NAMED else [*ordered[:MOST_NAMED], None, *ordered[-MOST_NAMED:]]
        return ", ".join("..." if end is None else self._rate(*end) for end in ends)

    def _rate(self, task_id: str, prompt: _Prompt) -> str:
        rate = f"{prompt.mean:.3g}" if self._is_between else f"{prompt.mean:.0%}"
        return f"{rate} of {prompt.answers} {task_id:.60}"
