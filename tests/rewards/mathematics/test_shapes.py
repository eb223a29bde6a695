"""Guarantee: like is compared with like; order, brackets, names and bases count where they mean something."""

from __future__ import annotations

import pytest

from temper.rewards.mathematics.forms import decide
from temper.rewards.mathematics.shapes import RATIO, are_equal, read


def equal(gold: str, answer: str, is_final: bool) -> bool:
    """As far as writing and plain numbers tell."""
    return not gold.startswith(RATIO) and decide(gold, answer) is True


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("42", "scalar"),
        ("1,234", "scalar"),
        ("1, 2", "list"),
        (r"\{1\}", "list"),
        (r"1 \pm \sqrt{2}", "list"),
        ("(1,2)", "tuple"),
        ("(100,101)", "tuple"),
        ("[1,2)", "tuple"),
        (r"1 < x \le 2", "tuple"),
        (r"x \in [1,2]", "tuple"),
        ("x < 1 or x > 2", "union"),
        (r"x \ne 2", "union"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "matrix"),
        ("x = 5", "scalar"),
        ("x + y = 5", "relation"),
        ("f(2) < f(1)", "relation"),
        (r"\text{no}", "words"),
        ("east", "words"),
        ("A", "words"),
        ("xy", "scalar"),
        ("1011_2", "based"),
        ("12{:}30", "clock"),
    ],
)
def test_what_kind_of_thing_an_answer_is(text: str, kind: str) -> None:
    assert read(text).kind == kind


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("1, 2", r"\{2, 1\}"),
        ("-2, 5", r"x=-2 \text{ or } x=5"),
        ("(3,4)", "x=3, y=4"),
        ("(3,4)", "(x,y)=(3,4)"),
        ("[1,2)", r"2 > x \geq 1"),
        ("(-\\infty,1)\\cup(2,\\infty)", "x>2 or x<1"),
        ("[1,2)", r"\{x \mid 1 \le x < 2\}"),
        (r"\text{Monday}", "monday"),
        (r"\text{(A)}", "A"),
        (r"\text{B, E}", r"\text{E and B}"),
        ("1011_2", r"1011_{\text{two}}"),
        ("1011_2", "1011"),
        ("12:30", r"12\!:\!30 \text{ p.m.}"),
        ("3:4", "3/4"),
        ("x=5", "5"),
        ("42", "a + b = 42"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
    ],
)
def test_the_same_in_other_words_is_equal(gold: str, answer: str) -> None:
    assert are_equal(gold, answer, equal)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("1, 2", "1, 2, 3"),
        ("1, 2", "1 < x < 2"),
        ("1, 2", "(1, 2)"),
        ("(1,2)", "(2,1)"),
        ("(1,2)", "[1,2]"),
        ("[1,2)", "1 < x < 2"),
        ("x < 1", "x > 1"),
        (r"\text{east}", r"\text{seat}"),
        ("stop", "post"),
        ("A", "a"),
        ("1011_2", "1011_3"),
        ("1011", "1011_2"),
        ("11:15 \\text{ a.m.}", "11:15 \\text{ p.m.}"),
        ("x=5", "y=5"),
        ("42", "41 = 42,"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 \end{pmatrix}"),
    ],
)
def test_something_else_is_not(gold: str, answer: str) -> None:
    assert are_equal(gold, gold, equal)
    assert not are_equal(gold, answer, equal)
