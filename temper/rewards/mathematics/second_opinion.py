r"""A second checker for mathematical answers that shares no code with the first: no sympy, no forms.py.

Owns: its own reading of LaTeX as a Python expression, its evaluation over fractions, and "I do not know" (None).
Refuses: symbolic algebra. Expressions with variables are compared at fixed points; text, matrices and inequalities are
not judged. Every evaluation is bounded, so it runs in this process.
"""

from __future__ import annotations

import ast
import cmath
import itertools
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARACTERS = 300
MAX_BITS = 4096
"""Most bits of any exact number on the way; answers with larger ones are not judged."""
EQUAL, DIFFERENT = 1e-9, 1e-4
"""Relative gaps: at most the first is equal, at least the second different; between them it depends on rounding."""

Number = Fraction | complex
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|[A-Za-z]|[-+*/^(){}\[\],!|]")
_SPACING = re.compile(
    r"(?<=[0-9]),\\!(?=[0-9]{3})|\\left|\\right|\\displaystyle|\\!|\\,(?=[0-9]{3})|\{,\}(?=[0-9]{3})|,(?=[0-9]{3}(?![0-9]))(?<=[0-9],)"
)
_UNIT = re.compile(
    r"(?:\\(?:text|mathrm|mbox|textrm)\{[^{}]*\}|(?<=[0-9}])\s+(?:[A-Za-z]{2,}|[mghsL](?![A-Za-z]))(?:[ /][A-Za-z]+)*)"
    r"(?:\^\{?[0-9]\}?)?$"
)
_MIXED = re.compile(r"(?<![0-9.{/^])([0-9]+)\s*\\frac\{([0-9]+)\}\{([0-9]+)\}|(?<![0-9.])([0-9]+)\s+([0-9]+)/([0-9]+)")
_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}|[0-9][eE][0-9+-]")
_MAGNITUDE = re.compile(
    r"hundred|thousand|million|billion|trillion|dozen|squared|cubed|factorial|\b(?:or|and|less|more|fewer|times|half)\b"
)
_FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    "sqrt": cmath.sqrt, "sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan, "ln": cmath.log, "abs": abs,
}  # fmt: skip
_CONSTANTS: dict[str, Number] = {"pi": complex(math.pi), "e": complex(math.e), "i": 1j}
_POINTS = (Fraction(17, 13), Fraction(29, 11), Fraction(-7, 19))
_OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


class _Unknown(Exception):
    """Not something this checker understands."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """One answer: its parts as expressions, and what stands around them."""

    brackets: str
    parts: tuple[ast.expr, ...]
    unit: str
    is_percent: bool


def second_opinion(gold: str, answer: str) -> bool | None:
    """Whether the answer equals gold; None when this checker cannot tell."""
    try:
        return _compare(_read(gold), _read(answer))
    except (_Unknown, SyntaxError, ValueError, ArithmeticError, RecursionError):
        return None


def _compare(gold: _Reading, answer: _Reading) -> bool | None:
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return None
    if gold.brackets != answer.brackets:
        raise _Unknown("whether brackets matter")
    if len(gold.parts) != len(answer.parts):
        return False
    if len(gold.parts) == 1:
        return _compare_single(gold, answer)
    if gold.brackets in ("", "{}"):
        verdicts = [
            _all(_equal(left, right) for left, right in zip(gold.parts, order, strict=True))
            for order in itertools.permutations(answer.parts)
        ]
        return True if True in verdicts else None if None in verdicts else False
    return _all(_equal(left, right) for left, right in zip(gold.parts, answer.parts, strict=True))


def _compare_single(gold: _Reading, answer: _Reading) -> bool | None:
    (left,), (right,) = gold.parts, answer.parts
    if (
        _is_number(left)
        and not _is_number(right)
        and not _names(right)
        and any(isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Div | ast.Pow) for node in ast.walk(right))
    ):
        raise _Unknown("whether a sum or product counts as its value")
    verdict = _equal(left, right)
    if gold.is_percent == answer.is_percent or verdict is None:
        return verdict
    hundred = ast.Constant(100)
    share = (
        _equal(left, ast.BinOp(right, ast.Mult(), hundred))
        if gold.is_percent
        else _equal(ast.BinOp(left, ast.Mult(), hundred), right)
    )
    is_share = not gold.is_percent and abs(complex(_value(left, {}))) < 1
    return bool(share) or (verdict and not is_share)


def _all(verdicts: object) -> bool | None:
    found = list(verdicts)  # type: ignore[call-overload]
    return False if False in found else None if None in found else True


def _equal(left: ast.expr, right: ast.expr) -> bool | None:
    names = sorted(_names(left) | _names(right))
    verdicts = []
    for shift in range(len(_POINTS) if names else 1):
        points = {name: _POINTS[(place + shift) % len(_POINTS)] + place for place, name in enumerate(names)}
        verdicts.append(_near(_value(left, points), _value(right, points)))
    return _all(verdicts)


def _near(left: Number, right: Number) -> bool | None:
    if isinstance(left, Fraction) and isinstance(right, Fraction) and left == right:
        return True
    gap = abs(complex(left) - complex(right)) / max(1.0, abs(complex(left)), abs(complex(right)))
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return None if gap < DIFFERENT else False
    return True if gap <= EQUAL else None if gap < DIFFERENT else False


def _names(node: ast.expr) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} - _CONSTANTS.keys() - _FUNCTIONS.keys()


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return _is_number(node.left) and _is_number(node.right)
    return isinstance(node, ast.Constant)


def _value(node: ast.expr, points: Mapping[str, Number]) -> Number:
    """The value of an expression. Knows five operators and six functions; anything else is not understood."""
    match node:
        case ast.Constant(value=value) if isinstance(value, int | str):
            return _bounded(Fraction(value))
        case ast.Name(id=name) if name in points or name in _CONSTANTS:
            return points[name] if name in points else _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, points)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, points)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left, points), _value(right, points))
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _OPERATORS:
            return _bounded(_OPERATORS[type(kind)](_value(left, points), _value(right, points)))
        case ast.Call(func=ast.Name(id=name), args=[argument]) if name in _FUNCTIONS:
            return complex(_FUNCTIONS[name](complex(_value(argument, points))))
    raise _Unknown(ast.dump(node))


def _power(value: Number, exponent: Number) -> Number:
    if isinstance(value, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = max(value.numerator.bit_length(), value.denominator.bit_length()) * abs(exponent.numerator)
        if bits > MAX_BITS:
            raise _Unknown("a huge power")
        return value**exponent.numerator
    return complex(value) ** complex(exponent)


def _bounded(value: Number) -> Number:
    if isinstance(value, Fraction) and max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise _Unknown("a huge number")
    return value


def _read(text: str) -> _Reading:
    if len(text) > MAX_CHARACTERS or not text.isascii():
        raise _Unknown("too long, or signs beyond ASCII")
    text = _SPACING.sub("", text.strip()).strip()
    is_money = text.startswith("\\$") or (text.startswith("$") and not text.endswith("$"))
    text = text.lstrip("\\").strip("$") if is_money else text.strip("$")
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(r"\\frac\s*([0-9])\s*([0-9])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\s*(?:\^\s*\{?\\circ\}?|\\degree|degrees?)$", "", text)
    percent = re.search(r"\s*(?:\\?%|percent)$", text)
    text = text[: percent.start()] if percent else text
    unit = _UNIT.search(text)
    text = text[: unit.start()] if unit else text
    if (equation := re.match(r"\s*[A-Za-z]\s*=", text)) is not None:
        text = text[equation.end() :]
    if _WORDS.search(text) or (unit and _MAGNITUDE.search(unit.group())):
        raise _Unknown("words")
    text = _MIXED.sub(_improper, text.strip())
    brackets, inner = _outer(text)
    parts = tuple(_expression(part) for part in _split(inner))
    if len(parts) > 5:
        raise _Unknown("a long list")
    name = "dollar" if is_money else re.sub(r"\\[a-z]+|[{}\s]", "", unit.group()) if unit else ""
    return _Reading(brackets, parts, name, percent is not None)


def _improper(mixed: re.Match[str]) -> str:
    """ "1 1/2" as (3/2)."""
    whole, above, below = (int(digits) for digits in mixed.groups() if digits is not None)
    return f"({whole * below + above}/{below})"


def _outer(text: str) -> tuple[str, str]:
    """The brackets around a list, and what is inside; no brackets when there is no list."""
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return "{}", text[2:-2]
    if re.fullmatch(r"[(\[][^()\[\]]*,[^()\[\]]*[)\]]", text):
        return text[0] + text[-1], text[1:-1]
    return "", text


def _split(text: str) -> list[str]:
    """At commas outside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            raise _Unknown("unbalanced brackets")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _expression(text: str) -> ast.expr:
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != re.sub(r"\s", "", text):
        raise _Unknown("signs that are no mathematics")
    if re.search(r"[0-9]\s+[0-9]", text):
        raise _Unknown("two numbers side by side")
    source = _Source(tokens)
    expression = source.until("")
    return ast.parse(expression, mode="eval").body


class _Source:
    """Tokens of LaTeX to Python source. Numbers travel as strings, so that decimals stay exact."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._place = 0

    def until(self, end: str) -> str:
        """Everything up to the closing token, with the products that mathematics leaves unwritten."""
        pieces: list[str] = []
        while (token := self._next()) != end:
            if token in ("+", "-", "*", "/", "^", r"\cdot", r"\times", r"\div"):
                pieces.append({"^": "**", r"\cdot": "*", r"\times": "*", r"\div": "/"}.get(token, token))
                continue
            if pieces and pieces[-1][-1] not in "+-*/":
                pieces.append("*")
            pieces.append(self._operand(token))
        return "(" + "".join(pieces) + ")"

    def _next(self) -> str:
        """'' after the last."""
        self._place += 1
        return self._tokens[self._place - 1] if self._place <= len(self._tokens) else ""

    def _operand(self, token: str) -> str:
        if token[:1].isdigit() or token.startswith("."):
            return f"'{token}'"
        if token in ("(", "{"):
            return self.until({"(": ")", "{": "}"}[token])
        if token == r"\frac":
            above, below = self._operand(self._next()), self._operand(self._next())
            return f"({above}/{below})"
        if token == r"\sqrt" and self._tokens[self._place : self._place + 1] == ["["]:
            self._next()
            root = self.until("]")
            return f"({self._operand(self._next())}**('1'/{root}))"
        if token[1:] in _FUNCTIONS and token[0] == "\\":
            return f"{token[1:]}({self._operand(self._next())})"
        if token == r"\pi":
            return "pi"
        if token.isalpha():
            return token
        raise _Unknown(token)
