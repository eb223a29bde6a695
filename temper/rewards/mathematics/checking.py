"""Whether two mathematical answers are equal, as run in a worker process.

Owns: reading expressions with math-verify's LaTeX parser and comparing their values. Refuses: any import of torch or of
Temper's types. It imports sympy at the top and warms it up: those seconds must count as the worker's start, not against
the deadline of its first answer.
"""

from __future__ import annotations

import functools
import logging
import re
import zlib
from fractions import Fraction

import math_verify
import sympy  # type: ignore[import-untyped]
from latex2sympy2_extended import NormalizationConfig, latex2sympy  # type: ignore[import-untyped]
from latex2sympy2_extended.latex2sympy2 import ConversionConfig  # type: ignore[import-untyped]

from temper.rewards.mathematics.forms import decide, form, is_unevaluated, plain_number, rounds_to, without_name
from temper.rewards.mathematics.shapes import RATIO, Shape, are_equal, read

logging.getLogger("math_verify").setLevel(logging.ERROR)

DIGITS = 30
"""Precision to which values are computed."""
EQUAL = sympy.Rational(1, 10**20)
"""Relative gap below which two values are equal. There is no absolute one: 1.6e-19 is not 9.1e-31."""
NUM_POINTS = 3
_NORMAL = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
_CASED = ConversionConfig(lowercase_symbols=False)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_SIDE_BY_SIDE = re.compile(r"[0-9]\s+[0-9.]")


def verify(gold: str, answer: str) -> bool | str | None:
    """Whether the answer equals gold; None when gold cannot be understood, a reason when the answer broke the check.

    Gold is understood before the answer is looked at, so what breaks after that is the answer's doing.
    """
    if not _is_understood(gold):
        return None
    try:
        return are_equal(gold, answer, _equal)
    except (RecursionError, MemoryError):
        raise
    except Exception as error:
        return f"it cannot be read: {type(error).__name__}: {error}"


def verify_response(gold: str, response: str) -> bool:
    """math-verify alone on a whole response, as its documentation has it: what Temper's rules are compared with."""
    wanted = math_verify.parse(rf"\boxed{{{gold.strip().strip('$')}}}", parsing_timeout=None)
    return bool(math_verify.verify(wanted, math_verify.parse(response, parsing_timeout=None), timeout_seconds=None))


@functools.lru_cache(maxsize=1024)
def _is_understood(gold: str) -> bool:
    shape = read(gold)
    return bool(shape.text or shape.parts) and all(_is_expression(leaf.text) for leaf in _scalars(shape))


def _scalars(shape: Shape) -> list[Shape]:
    if shape.kind == "scalar":
        return [shape]
    return [leaf for part in shape.parts for leaf in _scalars(part)]


def _is_expression(text: str) -> bool:
    text = form(text).text
    return plain_number(text) is not None or "infty" in text or isinstance(_parse(text), sympy.Basic)


def _equal(gold: str, answer: str, is_final: bool) -> bool:
    """Whether two single expressions are equal. is_final: the answer must be evaluated where gold is a number."""
    if gold.startswith(RATIO):
        return _are_proportional(_parse(gold.removeprefix(RATIO)), _parse(answer.removeprefix(RATIO)))
    if (verdict := decide(gold, answer)) is not None:
        return verdict
    left, right = without_name(form(gold).text), form(answer).text
    if plain_number(left) is not None and is_final and is_unevaluated(right):
        return False
    if _SIDE_BY_SIDE.search(right) or not _letters(right) <= _letters(left):
        return False
    return _are_equal(_parse(left), _parse(right)) or _is_rounded(left, right)


def _letters(text: str) -> set[str]:
    """Letters of the words in an expression. In an answer a word is a product of letters only if gold has them, too."""
    return {letter for word in _WORD.findall(text) for letter in word}


@functools.lru_cache(maxsize=1024)
def _parse(text: str) -> sympy.Basic | None:
    """None for what is not mathematics: the parser raises all kinds of exceptions. Running out of stack is raised."""
    try:
        parsed = latex2sympy(text, convert_degrees=True, normalization_config=_NORMAL, conversion_config=_CASED)
        if not isinstance(parsed, sympy.Basic):
            return None
        exact = {decimal: sympy.Rational(str(decimal)) for decimal in parsed.atoms(sympy.Float)}
        return parsed.xreplace({**exact, sympy.Symbol("i"): sympy.I})
    except (RecursionError, MemoryError):
        raise
    except Exception:
        return None


def _are_equal(gold: sympy.Basic | None, answer: sympy.Basic | None) -> bool:
    """By value, at fixed points where there are variables."""
    if gold is None or answer is None:
        return False
    if gold == answer:
        return True
    verdicts = [_near(_value(gold, point), _value(answer, point)) for point in range(NUM_POINTS)]
    return None not in verdicts and all(verdicts)


def _are_proportional(gold: sympy.Basic | None, answer: sympy.Basic | None) -> bool:
    """Whether one is a constant multiple of the other, so that both are zero for the same values."""
    if not isinstance(gold, sympy.Expr) or not isinstance(answer, sympy.Expr):
        return False
    first, *others = [_quotient(_value(gold, point), _value(answer, point)) for point in range(NUM_POINTS)]
    return first is not None and all(_near(first, other) for other in others)


def _quotient(above: sympy.Expr | None, below: sympy.Expr | None) -> sympy.Expr | None:
    return None if above is None or below is None or above == 0 or below == 0 else above / below


def _value(expression: sympy.Basic, point: int) -> sympy.Expr | None:
    """Exact where it is rational, else to DIGITS; None where it has no finite value."""
    if not isinstance(expression, sympy.Expr):
        return None
    values = {symbol: _coordinate(str(symbol), point) for symbol in expression.free_symbols}
    try:
        value = expression.xreplace(values).doit()
        value = value if value.is_Rational else value.evalf(DIGITS)
    except (RecursionError, MemoryError):
        raise
    except Exception:  # of sympy, at what an answer asks of it: it has no value
        return None
    return value if value.is_number and value.is_finite else None


def _coordinate(name: str, point: int) -> sympy.Rational:
    """Value of a variable at one of the fixed points: positive, negative, positive."""
    seed = zlib.crc32(f"{name} {point}".encode())
    return sympy.Rational((-1) ** point * (seed % 89 + 11), seed // 89 % 13 + 17)


def _near(left: sympy.Expr | None, right: sympy.Expr | None) -> bool | None:
    if left is None or right is None:
        return None
    if left.is_Rational and right.is_Rational:
        return bool(left == right)
    size = max(abs(left), abs(right))
    return bool(abs(left - right) <= size * EQUAL)


def _is_rounded(gold: str, answer: str) -> bool:
    """Whether a decimal is the other value, rounded."""
    for exact, decimal in ((gold, answer), (answer, gold)):
        if plain_number(decimal) is not None and plain_number(exact) is None:
            value = _value(parsed, 0) if (parsed := _parse(exact)) is not None and not parsed.free_symbols else None
            if value is not None and value.is_real:
                return rounds_to(Fraction(str(sympy.Float(value, DIGITS))), decimal)
    return False


verify("x+1", r"\frac{x}{1}+1")
