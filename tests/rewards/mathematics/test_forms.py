"""Guarantee: one number written in many ways is one number; other units, tricks and towers are not."""

from __future__ import annotations

from fractions import Fraction

import pytest

from temper.rewards.mathematics.forms import Form, decide, form, is_refused, is_unevaluated, plain_number

pytestmark = pytest.mark.heavy


@pytest.mark.parametrize("text", ["1,00", "5.", "1e3", "1 000", "x", "", "1/0", "2/3/4", "--3", "9" * 5000, "٣", "1 2"])
def test_what_is_not_clearly_a_plain_number_is_left_to_math_verify(text: str) -> None:
    assert plain_number(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 1/2", Fraction(3, 2)),
        (r"1\frac{1}{2}", Fraction(3, 2)),
        (r"-2\frac{3}{4}", Fraction(-11, 4)),
        ("3 million", Fraction(3_000_000)),
        ("1.5 dozen", Fraction(18)),
        (".5", Fraction(1, 2)),
    ],
)
def test_mixed_numbers_and_words_of_magnitude_have_a_value(text: str, value: Fraction) -> None:
    assert plain_number(text) == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"5\text{ cm}", Form("5", "cm")),
        ("5 centimeters", Form("5", "cm")),
        ("5cm", Form("5", "cm")),
        ("5m", Form("5m")),
        ("5 m", Form("5", "m")),
        (r"24\text{ cm}^2", Form("24", "cm^2")),
        ("24 square centimeters", Form("24", "cm^2")),
        ("60 km per hour", Form("60", "km/hour")),
        (r"90^{\circ}", Form("90", "degree")),
        ("20°C", Form("20", "celsius")),
        (r"50\%", Form("50", "%")),
        (r"\$1,250", Form("1,250", "dollar")),
        ("-$5", Form("-5", "dollar")),
        ("$5$", Form("5")),
        (r"5\text{ apples}", Form("5")),
        (r"3\text{ million}", Form("3 million")),
        (r"\left(1,\,2\right)", Form("(1, 2)")),
        (r"\dfrac12", Form(r"\frac{1}{2}")),
        (r"10\,000", Form("10000")),
        ("2x", Form("2x")),
    ],
)
def test_normal_form(text: str, expected: Form) -> None:
    assert form(text) == expected


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("50%", "50", True),
        ("50%", "0.5", True),
        ("50", "50%", True),
        ("0.5", "50%", True),
        ("1.5", "150%", True),
        ("0.5", "0.5%", False),
        ("50%", "0.5%", False),
        ("50%", "5%", False),
    ],
)
def test_the_rule_of_percent(gold: str, answer: str, verdict: bool) -> None:
    assert decide(gold, answer) is verdict


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("5 cm", "5", True),
        ("5", "5 cm", True),
        ("5 cm", "5 km", False),
        ("100 cm", "1 m", False),
        ("42", r"6 \cdot 7", None),
        ("42", "42 apples", True),
        ("42", "42 squared", None),
        ("3000", r"3 \times 10^3", None),
        ("x+1", "1+x", None),
        ("1/3", "0.333333", True),
        ("1/4", "0.250001", False),
        ("1/3", "0.3333", False),
    ],
)
def test_decide(gold: str, answer: str, verdict: bool | None) -> None:
    assert decide(gold, answer) is verdict


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        (r"6 \cdot 7", True),
        (r"\frac{6 \cdot 7}{1}", True),
        (r"\int_0^{42} 1", True),
        ("> 42", True),
        ("42x", True),
        (r"\frac{84}{2}", False),
        (r"4.2 \times 10^{1}", False),
        (r"\sqrt{1764}", False),
    ],
)
def test_sums_products_and_bounds_are_unevaluated(text: str, is_open: bool) -> None:
    assert is_unevaluated(text) is is_open


@pytest.mark.parametrize(
    "answer",
    [
        r"\phantom{4}2",
        "42%\n41",
        "\uff14\uff12",
        "4\u200b2",
        "9^{9^{9}}",
        "2^{99999}",
        "99999!",
        "(" * 30 + "1",
        "1" * 2000,
    ],
)
def test_what_cannot_be_trusted_is_refused(answer: str) -> None:
    assert is_refused(answer)


@pytest.mark.parametrize(
    "answer", [r"e^{x^2}", r"50\%", "(50%)", "2^{10}", "∅", "\u22123", "5!", r"\frac{\pi}{2}", "café"]
)
def test_honest_answers_are_not_refused(answer: str) -> None:
    assert not is_refused(answer)
