"""Guarantee: the second checker is right where it has an opinion, and says so where it has none."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from temper.rewards.mathematics import second_opinion as module
from temper.rewards.mathematics.second_opinion import second_opinion

pytestmark = pytest.mark.heavy


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("1,000", "1000", True),
        (r"\frac{1}{2}", "0.5", True),
        (r"1\frac{1}{2}", "3/2", True),
        ("3/2", "1 1/2", True),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        (r"\sqrt[3]{8}", "2", True),
        ("(x-1)(x+1)", "x^2-1", True),
        ("(x-1)(x+1)", "x^2+1", False),
        ("2xy", "2yx", True),
        ("xy", "x+y", False),
        (r"\frac{\pi}{2}", r"\pi/2", True),
        ("(1, 2)", "(2, 1)", False),
        (r"\{1, 2\}", r"\{2, 1\}", True),
        ("[1,2)", r"\left[1,2\right)", True),
        ("0.5", "50%", True),
        ("0.5", "0.5%", False),
        ("72", "73", False),
        ("3+4i", "4i+3", True),
        (r"\text{Monday}", "Monday", None),
        ("5 cm", "5 km", None),
        ("42", r"6 \cdot 7", None),
        ("42", "42 thousand", None),
        (r"x \le 2", r"(-\infty, 2]", None),
        ("1", "1/0", None),
        ("1/3", "0.33333", None),
    ],
)
def test_second_opinion(gold: str, answer: str, verdict: bool | None) -> None:
    assert second_opinion(gold, answer) is verdict


@pytest.mark.parametrize(
    "hostile",
    [
        "9^{9^{9^9}}",
        "2^{99999999}",
        "(" * 250,
        "1+" * 140 + "1",
        "x" * 299,
        r"\frac" * 50,
        "9" * 290 + "^9",
        "__import__",
    ],
)
def test_hostile_answers_have_no_opinion_and_do_not_hang(hostile: str) -> None:
    assert second_opinion("42", hostile) in (None, False)


def test_it_shares_no_code_with_the_first_checker() -> None:
    tree = ast.parse(Path(module.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(name.startswith(("temper", "sympy", "math_verify")) for name in imported)
