"""Calls of an agent are laid out in rows by a plain rule, and what they have in common is read once for each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from temper.rollout.agents import DrawnCall, in_rows
from temper.types import Completion, Finish


def call(prompt: Sequence[Any], drawn: Sequence[int]) -> DrawnCall:
    nothing = [0.0] * len(drawn)
    completion = Completion(
        prompt_ids=tuple(prompt), token_ids=drawn, logprobs=nothing, versions=[0] * len(drawn), finish=Finish.STOP
    )
    return DrawnCall(completion=completion, text="", messages=())


def by_the_rule(calls: Sequence[DrawnCall]) -> list[DrawnCall]:
    """A call goes on from the longest row that its prompt begins with, of equal ones from the first."""
    rows: list[list[DrawnCall]] = []
    ends: list[tuple[int, ...]] = []
    for one in calls:
        prompt = one.completion.prompt_ids
        fitting = [place for place, end in enumerate(ends) if prompt[: len(end)] == end]
        place = max(fitting, key=lambda place: len(ends[place]), default=len(rows))
        if place == len(rows):
            rows.append([])
            ends.append(())
        rows[place].append(one)
        ends[place] = (*prompt, *one.completion.token_ids)
    return [one for row in rows for one in row]


def conversations(seed: int) -> list[DrawnCall]:
    """Calls that begin anew, go on, go on from one place twice, cut histories and say the same, with few ids."""
    chance, calls = random.Random(seed), list[DrawnCall]()
    for _ in range(chance.randrange(1, 14)):
        prompt = chance.choices((1, 2), k=chance.randrange(1, 3))
        if calls and chance.random() < 0.8:
            before = chance.choice(calls).completion
            whole = [*before.prompt_ids, *map(int, before.token_ids)]
            prompt = [*whole[: chance.choice((len(whole), len(whole), len(whole) - 1))], *prompt[chance.randrange(2) :]]
        calls.append(call(prompt, chance.choices((1, 2), k=chance.randrange(1, 3))))
    return calls


def test_rows_are_those_of_the_plain_rule() -> None:
    for seed in range(500):
        calls = conversations(seed)
        places = {id(one): place for place, one in enumerate(calls)}
        laid_out, expected = ([places[id(one)] for one in rows] for rows in (in_rows(calls), by_the_rule(calls)))
        assert laid_out == expected, f"seed {seed}"


class Id:
    """Counts how often ids are looked at."""

    looks = 0

    def __init__(self, value: int) -> None:
        self._value = value

    def __index__(self) -> int:
        Id.looks += 1
        return self._value

    def __eq__(self, other: object) -> bool:
        Id.looks += 1
        return isinstance(other, Id) and self._value == other._value

    def __hash__(self) -> int:
        Id.looks += 1
        return hash(self._value)


@pytest.mark.parametrize("num_conversations", [10, 40])
def test_what_conversations_share_is_read_once_for_each_call(num_conversations: int) -> None:
    """An agent that leads many of them, with a long text in common, held up the run when it ended."""
    calls = [call([*map(Id, range(500)), Id(side)], [7]) for side in range(num_conversations)]
    calls += [call([*map(Id, range(500)), Id(side), Id(7), Id(8)], [9]) for side in range(num_conversations)]
    Id.looks = 0
    laid_out = in_rows(calls)
    assert Id.looks <= 2 * sum(len(one.completion.prompt_ids) for one in calls)
    first, second = calls[:num_conversations], calls[num_conversations:]
    assert laid_out == [one for pair in zip(first, second, strict=True) for one in pair]
