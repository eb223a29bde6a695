"""Why groups were dropped, in words that name the part to mend.

Owns: the account of groups that filled no step, while a run looks for others and when it gives up, and the advice by
cause. Refuses: deciding what is dropped (group.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from temper.runs.pass_rates import PassRates
from temper.types import TRAINABLE_STATUSES, Group, ScoreKind, Status, Trajectory

DEGENERATE = "degenerate"
"""Reason to drop a group whose members all have one reward."""
MOST_NAMED = 3


def explain_drops(dropped: Sequence[tuple[Group, str]]) -> str:
    """What happened to dropped groups, the most frequent cause first, and what to do about each."""
    reasons = Counter(reason for _, reason in dropped)
    members = [member for group, reason in dropped if reason != DEGENERATE for member in _everyone(group)]
    environment = Counter(_environment_failure(member) for member in members if _is_environments(member))
    rewards = Counter(failure for member in members if not _is_environments(member) for failure in _failures(member))
    causes = [
        (reasons[DEGENERATE], _degenerate([group for group, reason in dropped if reason == DEGENERATE])),
        (environment.total(), f"Episodes failed: {_most_common(environment)}. Mend the environment, or its tasks"),
        (rewards.total(), f"Answers could not be scored: {_most_common(rewards)}. Mend that reward"),
    ]
    said = [text for count, text in sorted(causes, key=lambda cause: -cause[0]) if count]
    return ". ".join((_list(reasons), *said)) if reasons else "Nothing was dropped"


def tell_drops(dropped: Sequence[tuple[Group, str]], *, most: int) -> str:
    """The same in one line, for a run that goes on. most: with more it gives up."""
    reasons = Counter(reason for _, reason in dropped)
    equal = [group for group, reason in dropped if reason == DEGENERATE]
    said = [f"{len(dropped)} groups were dropped so far for the next step, and others drawn: {_list(reasons)}"]
    if 2 * len(equal) > len(dropped):
        said.append(PassRates.of(equal).advise())
    return ". ".join((*said, f"The run ends when more than {most} are (rollout.max_rounds)"))


def _list(reasons: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in reasons.most_common(MOST_NAMED))


def _everyone(group: Group) -> tuple[Trajectory, ...]:
    return group.trajectories if group.greedy is None else (*group.trajectories, group.greedy)


def _is_environments(member: Trajectory) -> bool:
    """Whether an episode did not come to an end that can be scored."""
    return member.status not in TRAINABLE_STATUSES


def _environment_failure(member: Trajectory) -> str:
    return f"{member.status.value} ({member.error})" if member.error else member.status.value


def _failures(member: Trajectory) -> list[str]:
    """What kept a member from having a score, by reward where that is known."""
    failed = [
        f'reward "{name}": {part.reason}' for name, part in member.score_parts.items() if part.kind is ScoreKind.ERROR
    ]
    return failed or ([] if member.score.is_value else [str(member.score.reason)])


def _degenerate(groups: Sequence[Group]) -> str:
    values = {value for group in groups for value in group.rewards}
    same = f"; it was {values.pop():g} for every answer" if len(values) == 1 else ""
    rates = PassRates.of(groups)
    said = [f"In a degenerate group all members have one reward{same}", rates.describe(), rates.advise(), _cut(groups)]
    said.append(
        "rollout.max_rounds bounds how long is searched for groups that differ; rollout.drop_degenerate = false trains "
        "on equal ones too, which have no gradient in objectives that compare members"
    )
    return ". ".join(filter(None, said))


def _cut(groups: Sequence[Group]) -> str:
    """What to do where answers had no room to be right."""
    members = [member for group in groups for member in group.trainable]
    num_cut = sum(member.status is Status.TRUNCATED_LENGTH for member in members)
    if 2 * num_cut < len(members) or not num_cut:
        return ""
    return f"{num_cut} of {len(members)} answers were cut at their length: a larger sampling.max_new_tokens"


def _most_common(failures: Counter[str]) -> str:
    return "; ".join(f"{count} x {failure:.300}" for failure, count in failures.most_common(MOST_NAMED))
