"""Is a policy ready for reinforcement learning? Groups of training prompts are rolled as in training and five numbers
must hold: form, verifier, signal, variety, length.

Owns: the numbers, their table, the refusal. Refuses: training; nothing it draws is trained on.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.table import Table

from temper.errors import UserError
from temper.evals.suites import ANSWERS
from temper.rollout.episode import EpisodeSetup
from temper.rollout.group import NOTHING, Extras, run_group
from temper.rollout.selection import AnswerOf
from temper.tasks.dataset import fingerprint
from temper.types import Group, ScoreKind, Status, Task, Trajectory

THRESHOLDS: Mapping[str, float] = {
    "prompts": 200, "format": 0.9, "errors": 0.01, "mixed": 0.3, "distinct": 1.5, "truncated": 0.1,
}  # fmt: skip
"""How many prompts are rolled, and the limits of the five numbers: arguments of the alarm "readiness"."""
FORM_REWARDS = ("format", "tags", "json_schema")
"""Rewards that say whether a response has the form that was asked for."""
ANSWER_OF_REWARD = {"math": "math", "countdown": "line", "code": "text"}
"""How the final answers of a reward's responses are told apart; "line" for all others: reasons differ, answers may not.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    name: str
    """Name of the check and of its threshold."""
    meaning: str
    value: float
    threshold: float
    is_floor: bool
    """Whether the value must be at least the threshold; else at most."""
    advice: str

    @property
    def has_passed(self) -> bool:
        return self.value >= self.threshold if self.is_floor else self.value <= self.threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    checks: tuple[Check, ...]
    num_prompts: int
    group_size: int
    note: str
    """Says when there were fewer prompts than asked for; '' otherwise."""

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.has_passed)

    @property
    def metrics(self) -> dict[str, float]:
        """For the record, with ready/failed: how many checks did not hold."""
        return {**{f"ready/{c.name}": c.value for c in self.checks}, "ready/failed": float(len(self.failed))}


def first_prompts(tasks: Iterable[Task], count: int) -> list[Task]:
    """The first `count` tasks that ask different things; fewer when there are no more."""
    found: dict[str, Task] = {}
    for task in tasks:
        if len(found) >= count:
            break
        found.setdefault(fingerprint(task) if task.messages else task.id, task)
    return list(found.values())


async def roll(
    setup: EpisodeSetup,
    tasks: Sequence[Task],
    *,
    group_size: int,
    at_once: int,
    name: str,
    extras: Extras = NOTHING,
) -> list[Group]:
    """One group per task. In rounds of `at_once` groups that start together: what is batched together reproduces.

    name: begins the names of all requests, so that no random number is one of training's.
    """
    groups: list[Group] = []
    for start in range(0, len(tasks), at_once):
        part = tasks[start : start + at_once]
        groups += await asyncio.gather(
            *(
                run_group(setup, task, draw=start + place, group_size=group_size, prefix=name, extras=extras)
                for place, task in enumerate(part)
            )
        )
    return groups


def measure(groups: Sequence[Group], *, answer_of: AnswerOf, thresholds: Mapping[str, float] = THRESHOLDS) -> Readiness:
    """The five numbers of rolled groups. Attempts that failed count: none of them has form or an answer."""
    attempts = [attempt for group in groups for attempt in group.trajectories]
    if not attempts:
        raise UserError("the look at readiness has no training prompt to look at")
    wanted = int(thresholds["prompts"])
    is_few = len(groups) < wanted
    return Readiness(
        checks=tuple(
            Check(
                name=name,
                meaning=meaning,
                value=value(groups, attempts, answer_of),
                threshold=thresholds[name],
                is_floor=is_floor,
                advice=advice,
            )
            for name, is_floor, value, meaning, advice in _CHECKS
        ),
        num_prompts=len(groups),
        group_size=max(len(group.trajectories) for group in groups),
        note=f"{len(groups)} training prompts instead of {wanted}: there are no more different ones" if is_few else "",
    )


def has_form(attempt: Trajectory, answer_of: AnswerOf) -> bool:
    """Readable for the environment, with an answer in it, and of the form that the reward's own parts ask for."""
    if attempt.status is Status.BAD_FORMAT or not attempt.turns or answer_of(attempt.text) is None:
        return False
    forms = [score for name, score in attempt.score_parts.items() if re.sub(r"_\d+$", "", name) in FORM_REWARDS]
    return all(score.value is not None and score.value >= 1 for score in forms)


_Measure = Callable[[Sequence[Group], Sequence[Trajectory], AnswerOf], float]


def _formed(groups: Sequence[Group], attempts: Sequence[Trajectory], answer_of: AnswerOf) -> float:
    return fmean(has_form(attempt, answer_of) for attempt in attempts)


def _errors(groups: Sequence[Group], attempts: Sequence[Trajectory], answer_of: AnswerOf) -> float:
    return fmean(attempt.score.kind is ScoreKind.ERROR for attempt in attempts)


def _mixed(groups: Sequence[Group], attempts: Sequence[Trajectory], answer_of: AnswerOf) -> float:
    return fmean(not group.is_degenerate for group in groups)


def _distinct(groups: Sequence[Group], attempts: Sequence[Trajectory], answer_of: AnswerOf) -> float:
    return fmean(len({_said(a, answer_of) for a in group.trajectories if a.turns} - {None}) for group in groups)


def _said(attempt: Trajectory, answer_of: AnswerOf) -> tuple[str, ...] | None:
    """Its answer, and in several turns how it came there: an agent that is done says so with the same words always."""
    answer = answer_of(attempt.text)
    return None if answer is None else (*(turn.message.content for turn in attempt.turns[:-1]), answer)


def _truncated(groups: Sequence[Group], attempts: Sequence[Trajectory], answer_of: AnswerOf) -> float:
    return fmean(attempt.is_truncated for attempt in attempts)


_CHECKS: tuple[tuple[str, bool, _Measure, str, str], ...] = (
    ("format", True, _formed, "responses of the form asked for",
     "train longer on examples of this form, or say the form in the prompt"),
    ("errors", False, _errors, "responses that verifier or environment failed on",
     "mend the verifier or the tasks it fails on; give it more time"),
    ("mixed", True, _mixed, "groups whose rewards differ",
     "tasks of another difficulty, larger groups, partial credit, or more supervised training"),
    ("distinct", True, _distinct, "different answers per group, or ways to them",
     "a higher temperature, or an earlier checkpoint: this one always says the same"),
    ("truncated", False, _truncated, "responses cut at the limit",
     "raise sampling.max_new_tokens, or train on examples that end"),
)  # fmt: skip


def answers_of(reward_kinds: Collection[str]) -> AnswerOf:
    """How final answers are told apart under these rewards."""
    named = next((ANSWER_OF_REWARD[kind] for kind in reward_kinds if kind in ANSWER_OF_REWARD), "line")
    return ANSWERS[named]


def render(readiness: Readiness) -> Table:
    title = f"ready for RL? {readiness.num_prompts} training prompts, {readiness.group_size} samples each"
    table = Table("check", "value", "wanted", "", "what to do", title=title, caption=readiness.note or None)
    for check in readiness.checks:
        verdict = "pass" if check.has_passed else "FAIL"
        row = (f"{check.name}: {check.meaning}", f"{check.value:.3f}", _wanted(check), verdict)
        table.add_row(*row, "" if check.has_passed else check.advice)
    return table


def require_ready(readiness: Readiness, *, is_forced: bool) -> None:
    """Raises UserError unless everything holds or the user wants it anyway."""
    if is_forced or not readiness.failed:
        return
    told = "; ".join(
        f"{check.name} {check.value:.3f} (wanted {_wanted(check)}): {check.advice}" for check in readiness.failed
    )
    raise UserError(
        f"the policy is not ready for RL: {told}. Do this first; or lower the threshold in the recipe, e.g. "
        f'alarms.readiness = {{level = "stop", {readiness.failed[0].name} = ...}}, or train anyway with '
        f'alarms.readiness = "note"'
    )


def _wanted(check: Check) -> str:
    return f"{'>=' if check.is_floor else '<='} {check.threshold:g}"
