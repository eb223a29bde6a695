"""Which attempts at one prompt are worth having: all that are right, the best, or the best with different answers.

Owns: the rules, as pure functions of scored attempts; equal scores are told apart by order, never by luck. Shared by
rejection sampling, which trains on what is kept, and best-of-N, which says it. Refuses: rolling and scoring.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from temper.errors import UserError, did_you_mean
from temper.plugins import require_options, split_named
from temper.types import Group, Scalar, Status, Trajectory

ROUNDING = 1e-9
"""A weighted sum of parts that should be 1 may be a hair below."""

AnswerOf = Callable[[str], str | None]
"""The final answer of a response, equal answers as equal texts; None: it states none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What a choice looks at. Only attempts with a real score become one."""

    score: float
    said: str
    """All that the model said, normalised: equal texts are one attempt drawn twice."""
    answer: str | None


Rule = Callable[[Sequence[Attempt]], list[int]]
"""The places of those to keep, the most wanted first."""


def correct(*, threshold: float = 1.0) -> Rule:
    """Everyone with at least this score, in the order drawn: a cap then takes no side."""
    return lambda attempts: [i for i, attempt in enumerate(attempts) if attempt.score >= threshold - ROUNDING]


def best(*, threshold: float = -math.inf) -> Rule:
    """The highest score, if it is at least the threshold; of equals the first."""

    def keep(attempts: Sequence[Attempt]) -> list[int]:
        return _ranked(attempts, threshold)[:1]

    return keep


def top(*, k: int = 2, threshold: float = -math.inf) -> Rule:
    """The k highest scores with different answers. What states no answer differs from what says something else."""
    if k < 1:
        raise UserError(f"rollout.keep: k={k} must be at least 1")

    def keep(attempts: Sequence[Attempt]) -> list[int]:
        first_of: dict[tuple[bool, str], int] = {}
        for place in _ranked(attempts, threshold):
            answer = attempts[place].answer
            first_of.setdefault((answer is None, attempts[place].said if answer is None else answer), place)
        return list(first_of.values())[:k]

    return keep


def _ranked(attempts: Sequence[Attempt], threshold: float) -> list[int]:
    passing = correct(threshold=threshold)(attempts)
    return sorted(passing, key=lambda place: -attempts[place].score)  # stable: equals stay in the order drawn


RULES: dict[str, Callable[..., Rule]] = {"best": best, "correct": correct, "top": top}


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A rule, how answers are told apart, and how many a prompt may keep."""

    name: str
    """Name for people, e.g. "correct(threshold=1.0)"."""
    rule: Rule
    cap: int = 0
    """Most attempts that are kept per prompt; 0: no limit but the rule's."""
    answer_of: AnswerOf


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    kept: tuple[int, ...]
    """Places of the kept attempts, the most wanted first."""
    duplicates: tuple[int, ...]
    """Places of attempts that said what an earlier one had said."""


def read_selection(table: str | Mapping[str, Scalar], answers: Mapping[str, AnswerOf]) -> Selection:
    """From a recipe's rollout.keep: "best", or {name = "correct", threshold = 1.0, cap = 4, answer = "math"}.

    answers: the ways to find a final answer, by name; "text" is one of them and the default.
    """
    example = 'keep = {name = "correct", threshold = 1.0, cap = 4}'
    name, given = split_named(table, RULES, where="rollout.keep: rule", example=example)
    cap, answer = given.pop("cap", 0), given.pop("answer", "text")
    if isinstance(cap, bool) or not isinstance(cap, int) or cap < 0:
        raise UserError(f"rollout.keep: cap={cap!r} must be a whole number from 0 (no limit) up")
    if not isinstance(answer, str) or answer not in answers:
        raise UserError(
            f"rollout.keep: answer={answer!r} is unknown.{did_you_mean(str(answer), answers)} "
            f"Known: {', '.join(answers)}"
        )
    require_options(RULES[name], given, where=f"rollout.keep = {name}")
    arguments = {**(RULES[name].__kwdefaults__ or {}), **given}
    shown = ", ".join(f"{key}={value}" for key, value in arguments.items() if value != -math.inf)
    return Selection(name=f"{name}({shown})", rule=RULES[name](**given), cap=cap, answer_of=answers[answer])


def choose(selection: Selection, attempts: Sequence[Attempt]) -> Choice:
    """De-duplicates, applies the rule, then the cap."""
    first_of: dict[str, int] = {}
    for place, attempt in enumerate(attempts):
        first_of.setdefault(attempt.said, place)
    different = list(first_of.values())
    kept = [different[place] for place in selection.rule([attempts[place] for place in different])]
    unique = set(different)
    return Choice(
        kept=tuple(kept[: selection.cap or len(kept)]),
        duplicates=tuple(place for place in range(len(attempts)) if place not in unique),
    )


def eligible(group: Group) -> tuple[Trajectory, ...]:
    """Members that may become examples: scored, brought to their end, never silent.

    Never what failed, and never what was cut: a row made of it would teach an end where none was drawn.
    """
    whole = [member for member in group.trainable if member.status is Status.COMPLETED]
    return tuple(member for member in whole if all(turn.message.content.strip() for turn in member.turns))


def select(selection: Selection, group: Group) -> tuple[Trajectory, ...]:
    """The members of one group that the rules keep, the most wanted first."""
    members = eligible(group)
    attempts = [attempt_of(member, selection.answer_of) for member in members]
    return tuple(members[place] for place in choose(selection, attempts).kept)


def attempt_of(trajectory: Trajectory, answer_of: AnswerOf) -> Attempt:
    assert trajectory.score.value is not None, "only scored attempts are chosen among"
    said = normalised(turn.message.content for turn in trajectory.turns)
    return Attempt(score=trajectory.score.value, said=said, answer=answer_of(trajectory.text))


def normalised(texts: Iterable[str]) -> str:
    """What was said, turn by turn, whatever its spacing and Unicode form. Case stays: "A" and "a" may be two things."""
    return "\x1e".join(" ".join(unicodedata.normalize("NFC", text).split()) for text in texts)
