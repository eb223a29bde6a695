"""Whether expressions are equal, and the fast path for plain numbers against it."""

from __future__ import annotations

import itertools
import random

import pytest

from temper.rewards.mathematics.forms import decide, form, plain_number

pytest.importorskip("math_verify")

from temper.rewards.mathematics.checking import _are_equal, _parse, verify


def equal_by_sympy(gold: str, answer: str) -> bool:
    return _are_equal(_parse(form(gold).text), _parse(form(answer).text))


PLAIN = [
    "0", "3", "-3", "+3", "- 3", "7", "007", "1000", "1,000", "1,000.0", "1000.00", "12,345,678", "0.5", ".5", "-.5",
    "1/2", "2/4", "-1/2", "1 / 2", "\\frac{1}{2}", "-\\frac{1}{2}", "\\dfrac{3}{6}", "1/3", "0.333333", "0.33333",
    "0.3333333", "0.333334", "2.5", "5/2", "$5", "\\$5", "$5$", "5", "5.0", "\u22123", "0.1", "0.10", "0.100001", "100",
    "99999", "123456789012", "0.000001", "0.0000001",
]  # fmt: skip


def test_every_number_of_the_grid_takes_the_fast_path() -> None:
    assert [text for text in PLAIN if plain_number(form(text).text) is None] == []


def test_the_fast_path_agrees_with_sympy_on_the_whole_grid() -> None:
    verdicts = {pair: decide(*pair) for pair in itertools.product(PLAIN, repeat=2)}
    wrong = [pair for pair, fast in verdicts.items() if fast is not equal_by_sympy(*pair)]
    # Six digits of a third are accepted as a third; sympy knows that they are not.
    thirds = {("1/3", "0.333333"), ("1/3", "0.3333333"), ("1/3", "0.333334")}
    assert set(wrong) == {pair for pair in verdicts if pair in thirds or pair[::-1] in thirds}
    # The check can fail: both verdicts occur.
    assert sum(verdicts.values()) > len(PLAIN)  # type: ignore[arg-type]


def written(value: int, below: int, draw: random.Random) -> str:
    """A number in one of the ways people write it: sign, commas, decimals, fractions."""
    forms = [f"{value / below:.4f}", f"{value / below:,.3f}", f"{value}/{below}", rf"\frac{{{value}}}{{{below}}}"]
    if value < 0:
        forms[3] = rf"-\frac{{{-value}}}{{{below}}}"
    if value % below == 0:
        forms += [str(value // below), f"{value // below:,}", f"{value // below}.0", f"${value // below}$"]
    return draw.choice(forms)


def test_the_fast_path_agrees_with_sympy_on_random_numbers() -> None:
    draw = random.Random(0)
    decided = {True: 0, False: 0}
    for _ in range(2000):
        value = draw.choice((1, -1)) * draw.randrange(1, draw.choice((20, 2000, 10**6)))
        below = draw.choice((1, 1, 1, 2, 4, 5, 8, 10, 100))
        left = written(value, below, draw)
        right = written(draw.choice((value, value, -value, value + 1, value * 10)), below, draw)
        if (fast := decide(left, right)) is not None:
            assert fast == equal_by_sympy(left, right), (left, right)
            decided[fast] += 1
    assert min(decided.values()) > 300, "the check can fail: both verdicts occur"


@pytest.mark.parametrize(
    ("gold", "answer", "expected"),
    [
        (r"\frac{\sqrt{3}}{2}", r"\sqrt{3}/2", True),
        ("x^2+2x+1", "(x+1)^2", True),
        (r"\{1,2\}", r"\{2,1\}", True),
        ("(1,2)", "(1,2]", False),
        (r"5\text{ cm}", "5", True),
        ("", "5", None),
        ("{", "5", None),
    ],
)
def test_verify(gold: str, answer: str, expected: bool | None) -> None:
    assert verify(gold, answer) is expected
