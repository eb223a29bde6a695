"""How long answers are.

Owns: lengths drawn from a distribution, the same for the same request. Refuses: where a distribution comes from.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from temper.errors import UserError

Lengths = Callable[[str, int], int]
"""Tokens of an answer, by the group's name and the member's place in it. The same question has the same answer."""


def fixed(tokens: int) -> Lengths:
    return lambda group, member: tokens


def uniform(low: int, high: int, seed: int) -> Lengths:
    return lambda group, member: _source(seed, group, member).randint(low, high)


def lognormal(mean: float, spread: float, seed: int) -> Lengths:
    """`spread`: standard deviation of the logarithm; 0.5 is usual, 1 is a heavy tail."""
    middle = math.log(mean) - spread**2 / 2
    return lambda group, member: max(1, round(_source(seed, group, member).lognormvariate(middle, spread)))


def tail(tokens: int, share: float, times: float, seed: int) -> Lengths:
    """A share of the answers is so many times as long as the others."""
    return lambda group, member: round(tokens * (times if _source(seed, group, member).random() < share else 1))


def groups_tail(tokens: int, share: float, times: float, seed: int) -> Lengths:
    """The same by group: a hard prompt is long for all of its answers."""
    return lambda group, member: round(tokens * (times if random.Random(f"{seed}/{group}").random() < share else 1))


def measured(groups: Sequence[Sequence[int]], seed: int) -> Lengths:
    """Lengths of groups that were drawn once: a group takes those of one of them, so that hard prompts stay long for
    all of their members. More members than that had take theirs again."""

    def length(group: str, member: int) -> int:
        own = groups[random.Random(f"{seed}/{group}").randrange(len(groups))]
        return own[member % len(own)] if member < len(own) else own[_source(seed, group, member).randrange(len(own))]

    return length


class OfferedLengths:
    """Lengths, and a note of every group that they were asked for: also of one that is not trained yet, or was cut."""

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self._names: dict[int, str] = {}
        """Of groups, by draw."""

    def __call__(self, group: str, member: int) -> int:
        draw = group.rpartition("#")[2]
        if draw.isdecimal():
            self._names[int(draw)] = group
        return self._lengths(group, member)

    def means(self, group_size: int, longest: int) -> dict[int, float]:
        """Mean length of the answers of every group, by draw, where none may be longer than `longest`."""
        return {
            draw: sum(min(longest, self._lengths(name, member)) for member in range(group_size)) / group_size
            for draw, name in self._names.items()
        }


def _source(seed: int, group: str, member: int) -> random.Random:
    return random.Random(f"{seed}/{group}/{member}")


FORMS: dict[str, tuple[Callable[..., Lengths], str]] = {
    "fixed": (lambda tokens, seed: fixed(tokens), "TOKENS"),
    "uniform": (uniform, "LOW:HIGH"),
    "lognormal": (lognormal, "MEAN:SPREAD"),
    "tail": (tail, "TOKENS:SHARE:TIMES"),
    "groups": (groups_tail, "TOKENS:SHARE:TIMES"),
}
"""Distributions that can be written, each with how its numbers are written."""


def read_lengths(text: str, seed: int) -> Lengths:
    """From e.g. "lognormal:400:0.8". Raises UserError for what is none of FORMS."""
    name, _, rest = text.partition(":")
    written = ", ".join(f"{form}:{numbers}" for form, (_, numbers) in FORMS.items())
    try:
        numbers = [float(part) for part in rest.split(":")]
        whole = [int(number) if number.is_integer() else number for number in numbers]
        assert name in FORMS
        assert len(whole) == FORMS[name][1].count(":") + 1
        assert all(0 < number < math.inf for number in whole)
    except (ValueError, AssertionError, OverflowError) as error:
        raise UserError(f'--lengths "{text}": write {written}, e.g. lognormal:400:0.8') from error
    return FORMS[name][0](*whole, seed=seed)
