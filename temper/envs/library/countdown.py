"""Countdown: reach a target from given numbers with + - * / and parentheses.

Owns: generator and reward "countdown", and the parser behind them. Refuses: eval, floats, anything but whole numbers
and the four signs.
"""

from __future__ import annotations

import json
import operator
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction

from temper.envs.adapters.reasoning_gym import final_answer
from temper.errors import UserError
from temper.protocols import Reward
from temper.types import Message, Score, Task, Trajectory

SIGNS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
MAX_CHARACTERS = 200
"""Longest expression. Far more than any task needs, and few enough that no nesting exhausts the stack."""
_TOKEN = re.compile(r"\s*([0-9]+|[-+*/()])")
_TYPED = str.maketrans({"\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-"})
"""The signs as books print them."""


class BadExpression(ValueError):
    """Why a text is not a legal expression over the given numbers."""


def countdown(
    index: int,
    seed: int,
    *,
    min_numbers: int = 3,
    max_numbers: int = 4,
    largest: int = 25,
    max_target: int = 100,
    signs: str = "+-*/",
) -> Task:
    """Numbers from 1 to `largest` and a target that some expression over all of them reaches; `signs` are allowed."""
    if not 2 <= min_numbers <= max_numbers <= 8 or not 2 <= largest <= 1000 or max_target < 2:
        raise UserError(
            f"min_numbers={min_numbers}, max_numbers={max_numbers}, largest={largest}, max_target={max_target} must "
            "satisfy 2 <= min_numbers <= max_numbers <= 8, 2 <= largest <= 1000 and max_target >= 2."
        )
    if not signs or set(signs) - set(SIGNS):
        raise UserError(f'signs={signs!r} must be some of "+-*/", e.g. signs = "+-".')
    draw = random.Random(f"countdown/{seed}/{index}")
    for _ in range(10_000):
        numbers = [draw.randint(1, largest) for _ in range(draw.randint(min_numbers, max_numbers))]
        value, text = _combine(numbers, signs, draw)
        if value.denominator == 1 and 1 <= value <= max_target and value not in numbers:
            return _task(f"countdown:{seed}:{index}", numbers, int(value), text, signs)
    raise UserError(
        f"no target up to max_target={max_target} was found for numbers up to {largest} with signs {signs!r}. "
        "Raise max_target, lower largest, or allow more signs."
    )


def _combine(numbers: Sequence[int], signs: str, draw: random.Random) -> tuple[Fraction, str]:
    """A random expression over all numbers; every value on the way is a whole number above 0."""
    parts = [(Fraction(number), str(number)) for number in numbers]
    while len(parts) > 1:
        (left, left_text), (right, right_text) = (parts.pop(draw.randrange(len(parts))) for _ in range(2))
        sign = draw.choice(signs)
        value = SIGNS[sign](left, right)
        if value <= 0 or value.denominator != 1:
            return Fraction(0), ""
        parts.append((value, f"({left_text} {sign} {right_text})"))
    value, text = parts[0]
    return value, text[1:-1]


def _task(name: str, numbers: Sequence[int], target: int, solution: str, signs: str) -> Task:
    allowed = " ".join(sign for sign in SIGNS if sign in signs)
    prompt = (
        f"Using the numbers {', '.join(map(str, numbers))}, each at most once, and the signs {allowed} ( ), write an "
        f"expression that equals {target}. End with the expression alone on the last line."
    )
    return Task(
        id=name,
        messages=(Message(role="user", content=prompt),),
        answer=solution,
        extra={"numbers": json.dumps(list(numbers)), "target": target, "signs": signs},
    )


def evaluate(text: str, numbers: Sequence[int], signs: str = "+-*/") -> Fraction:
    """The exact value of an expression that uses each of `numbers` at most once, and only `signs`."""
    tokens = _tokens(text.translate(_TYPED))
    if banned := set(tokens) & (set(SIGNS) - set(signs)):
        raise BadExpression(f"{min(banned)!r} is not allowed here")
    used = Counter(int(token) for token in tokens if token.isdigit())
    if extra := used - Counter(numbers):
        raise BadExpression(f"{next(iter(extra))} is not given, or not that often")
    value = _sum(tokens)
    if tokens:
        raise BadExpression(f"{tokens[0]!r} stands where a sign or the end should be")
    return value


def _tokens(text: str) -> list[str]:
    text = text.strip()
    if len(text) > MAX_CHARACTERS:
        raise BadExpression(f"it is longer than {MAX_CHARACTERS} characters")
    tokens, place = [], 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None:
            raise BadExpression(f"{text[place]!r} is no number, sign or parenthesis")
        tokens.append(found.group(1))
        place = found.end()
    return tokens


# Recursive descent over the tokens, consumed from the front: sums of products of atoms.
def _sum(tokens: list[str]) -> Fraction:
    value = _product(tokens)
    while tokens and tokens[0] in "+-":
        value = SIGNS[tokens.pop(0)](value, _product(tokens))
    return value


def _product(tokens: list[str]) -> Fraction:
    value = _atom(tokens)
    while tokens and tokens[0] in "*/":
        sign, right = tokens.pop(0), _atom(tokens)
        if sign == "/" and right == 0:
            raise BadExpression("it divides by 0")
        value = SIGNS[sign](value, right)
    return value


def _atom(tokens: list[str]) -> Fraction:
    token = tokens.pop(0) if tokens else ""
    if token.isdigit():
        return Fraction(int(token))
    if token != "(":
        raise BadExpression(f"a number or a parenthesis is missing before {token or 'the end'!r}")
    value = _sum(tokens)
    if not tokens or tokens.pop(0) != ")":
        raise BadExpression("a parenthesis is not closed")
    return value


class CountdownReward(Reward):
    """1 when the last line, or what the last <answer></answer> holds, is an expression that equals the target.

    An ending "= target" is allowed. legal_credit is the score of a legal expression with another value.
    """

    name = "countdown"

    def __init__(self, *, legal_credit: float = 0.0) -> None:
        if not 0 <= legal_credit < 1:
            raise UserError(f'reward "countdown": legal_credit={legal_credit} must be at least 0 and below 1.')
        self._legal_credit = legal_credit

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        if (problem := self.check(task)) is not None:
            return Score.error(problem)
        target = Fraction(int(task.extra["target"]))
        expression, equals, claim = final_answer(trajectory.text, "", strict=False).partition("=")
        if equals and claim.strip() != str(target):
            return Score.of(0.0)
        numbers = json.loads(str(task.extra["numbers"]))
        try:
            value = evaluate(expression, numbers, str(task.extra.get("signs", "+-*/")))
        except BadExpression:
            return Score.of(0.0)
        return Score.of(1.0 if value == target else self._legal_credit)

    def check(self, task: Task) -> str | None:
        try:
            numbers, target = json.loads(str(task.extra["numbers"])), task.extra["target"]
        except (KeyError, ValueError):
            return 'it needs extra "numbers", a JSON list of whole numbers such as "[3, 5, 8]", and extra "target"'
        is_whole = isinstance(numbers, list) and all(type(number) is int and number >= 0 for number in numbers)
        if not is_whole or type(target) is not int:
            return f"numbers {numbers!r:.60} and target {target!r:.20} must be whole numbers"
        return None
