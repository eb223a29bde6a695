"""Final answers to mathematical questions: finding them in text, and telling whether two are equal.

Owns: extraction, and the fast path for plain numbers. Refuses: whatever takes mathematics (math_worker.py).
"""

from __future__ import annotations

import re
from fractions import Fraction

NEAR = Fraction(1, 10**5)
"""Numbers that differ by less are left to math-verify, which rounds decimals to 6 places."""
MAX_PLAIN_DIGITS = 15
"""math-verify computes decimals in double precision; longer ones are left to it."""

_NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_PLAIN = re.compile(rf"(?P<sign>[+-]?)\s?(?:(?P<number>{_NUMBER})|(?P<above>[0-9]+)\s?/\s?(?P<below>[0-9]+))")
_FRACTION = re.compile(r"\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")
# A minus after a word or a closing bracket subtracts, as in "5-3"; elsewhere it is a sign.
_LAST = re.compile(
    rf"(?<![\w)\]}}])-?(?:{_FRACTION.pattern}|(?:{_NUMBER})(?:/[0-9]+)?\s?(?:\\?%)?)|(?:{_NUMBER})(?:\\?%)?"
)


def find_answer(text: str, *, require_boxed: bool = False) -> str | None:
    r"""The last \boxed{...}; else what follows the last "####"; else the last number. None when there is none."""
    boxed = find_boxed(text)
    if boxed is not None or require_boxed:
        return boxed
    _, mark, rest = text.rpartition("####")
    if mark and (line := rest.strip().partition("\n")[0].rstrip(" .")):
        return line
    numbers = [match.group() for match in _LAST.finditer(text)]
    return numbers[-1].strip() if numbers else None


def gold_answer(text: str) -> str:
    """The gold answer as written in the data, without box and full stop."""
    return (find_boxed(text) or text).strip().rstrip(".")


def find_boxed(text: str) -> str | None:
    r"""The content of the last complete \boxed{...}, braces balanced; None when there is none or it is empty."""
    end = len(text)
    while (start := text.rfind("\\boxed{", 0, end)) >= 0:
        content = _balanced(text, start + len("\\boxed{"))
        if content is not None:
            return content.strip().rstrip(".") or None
        end = start
    return None


def _balanced(text: str, start: int) -> str | None:
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", text[start:]):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)  # "\{" is a printed brace and counts nothing
        if depth == 0:
            return text[start : start + brace.start()]
    return None


def plain_number(text: str) -> Fraction | None:
    """The value of an integer, decimal, number with thousands commas or simple fraction; None for anything else."""
    text = text.strip().removeprefix("\\$").strip("$").strip().replace("\u2212", "-")
    match = _PLAIN.fullmatch(_FRACTION.sub(r"\1/\2", text))
    if match is None or sum(c.isdigit() for c in text) > MAX_PLAIN_DIGITS:
        return None
    if match["number"]:
        value = Fraction(match["number"].replace(",", ""))
    elif int(match["below"]) == 0:
        return None
    else:
        value = Fraction(int(match["above"]), int(match["below"]))
    return -value if match["sign"] == "-" else value


def equal_plain(gold: str, answer: str) -> bool | None:
    """Whether two plain numbers are equal; None when it takes math-verify to tell."""
    if (left := plain_number(gold)) is None or (right := plain_number(answer)) is None:
        return None
    if left == right:
        return True
    return None if abs(left - right) < NEAR else False
