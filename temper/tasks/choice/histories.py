"""What a stage has seen of each prompt: attempts, passes, a running pass rate.

Owns: how a group changes a prompt's history, and the part of a checkpoint that holds all of them. Refuses: deciding
anything (the choosers beside this file), and prompts of generators without end, which never come back.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from temper.types import Group, PromptHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class RateRules:
    """How answers become a running pass rate."""

    newest: float = 0.5
    """Weight of a prompt's newest group; the rest is the rate before it. 1: the newest group alone."""
    pass_score: float | None = None
    """An answer with at least this score passes. None: its score is the share that it passes by, within 0 and 1."""


def passes_of(group: Group, rules: RateRules) -> list[float]:
    """By how much each scored answer of the policy passes, in member order. An opponent's answers say nothing of it."""
    scores = [t.score.value for t in group.trainable if t.score.value is not None and not t.is_opponents]
    if rules.pass_score is None:
        return [min(1.0, max(0.0, score)) for score in scores]
    return [float(score >= rules.pass_score) for score in scores]


def extend_history(history: PromptHistory, passes: Sequence[float], step: int, rules: RateRules) -> PromptHistory:
    """The history with one more group. A group without a scored answer changes no rate: a failure is never a reward."""
    seen = replace(history, draws=history.draws + 1, last_step=step)
    if not passes:
        return seen
    now = sum(passes) / len(passes)
    rate = now if history.rate is None else (1 - rules.newest) * history.rate + rules.newest * now
    return replace(seen, attempts=seen.attempts + len(passes), passed=seen.passed + sum(passes), rate=rate)


class Histories:
    """The histories of a stage's prompts, by task id."""

    def __init__(self, rules: RateRules = RateRules(), passing: Collection[str] = ()) -> None:
        """`passing`: names of sources without end. Their prompts are measured and not kept: none is drawn twice."""
        self._rules = rules
        self._passing = frozenset(passing)
        self._known: dict[str, PromptHistory] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[PromptHistory]:
        return iter(self._known.values())

    def get(self, task_id: str) -> PromptHistory | None:
        """None: no step has consumed a group of it."""
        return self._known.get(task_id)

    def update(self, step: int, groups: Iterable[Group]) -> tuple[PromptHistory, ...]:
        """Histories of the prompts that a step consumed, after it, each once. In draw order: who finished first is
        chance, and an average remembers its order."""
        changed: dict[str, PromptHistory] = {}
        for group in sorted(groups, key=lambda group: group.draw):
            task = group.task
            history = changed.get(task.id) or self._known.get(task.id)
            history = history or PromptHistory(task_id=task.id, source=task.source)
            changed[task.id] = extend_history(history, passes_of(group, self._rules), step, self._rules)
        self._known |= {name: history for name, history in changed.items() if history.source not in self._passing}
        return tuple(changed.values())

    def state(self) -> list[str]:
        """One line per prompt, as a JSON list. Numbers come back to the bit."""
        return [
            json.dumps([one.task_id, one.source, one.draws, one.attempts, one.passed, one.rate, one.last_step])
            for one in self._known.values()
        ]

    def load_state(self, lines: Iterable[str]) -> None:
        names = ("task_id", "source", "draws", "attempts", "passed", "rate", "last_step")
        found = [PromptHistory(**dict(zip(names, json.loads(line), strict=True))) for line in lines]
        self._known = {history.task_id: history for history in found}
