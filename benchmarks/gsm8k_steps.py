"""Partial credit for GSM8K: a wrong answer is paid for the published intermediate results it reached.

A reward of a user's own, for benchmarks/gsm8k.py --step-credit: of problems that a small model fails in all
of its attempts it learns nothing from right or wrong alone.
"""

from __future__ import annotations

import re

_RESULT = re.compile(r"=\s*\$?(-?[\d.,]+)\s*>>")
_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?")


def steps(prompt: str, response: str, solution: str) -> float:
    r"""The share of the results that the solution calculates on its way (<<48/2=24>>) and the response states.

    0 for a right response, which the other reward pays, so that every right way is worth the same. Numbers
    of the question count nothing, and numbers at random cost: the share is of all new numbers where those are more.
    """
    gold = _value(solution.rpartition("\\boxed{")[2].partition("}")[0])
    told = [_value(number) for number in _NUMBER.findall(response.rpartition("\\boxed{")[2].partition("}")[0])]
    if told and told[-1] == gold:
        return 0.0
    given = set(map(_value, _NUMBER.findall(prompt)))
    wanted = set(map(_value, _RESULT.findall(solution))) - given - {gold}
    stated = set(map(_value, _NUMBER.findall(response))) - given
    return len(wanted & stated) / max(len(wanted), len(stated), 1)


def _value(number: str) -> float | None:
    try:
        return float(number.replace(",", "").rstrip("."))
    except ValueError:
        return None
