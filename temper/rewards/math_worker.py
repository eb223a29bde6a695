"""math-verify, as run in a worker process.

Owns: the call into math-verify. Refuses: any import of torch or of Temper's types. It imports math-verify at the top
and warms it up: those seconds must count as the worker's start, not against the deadline of its first answer.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import math_verify

logging.getLogger("math_verify").setLevel(logging.ERROR)


def verify(gold: str, answer: str) -> bool | None:
    """Whether the answer equals gold; None when gold cannot be parsed."""
    parsed = _parse(gold)
    if all(isinstance(part, str) for part in parsed):  # math-verify returns the text itself when it understood nothing
        return None
    # Their time-outs use signals; the pool's deadline is the one that holds. By default they swallow every exception
    # into False, but a comparison that broke down is not a wrong answer.
    return bool(math_verify.verify(list(parsed), list(_parse(answer)), timeout_seconds=None, raise_on_error=True))


def verify_response(gold: str, response: str) -> bool:
    """math-verify alone on a whole response, as its documentation has it: what Temper's rules are compared with."""
    wanted = math_verify.parse(rf"\boxed{{{gold.strip().strip('$')}}}", parsing_timeout=None)
    return bool(math_verify.verify(wanted, math_verify.parse(response, parsing_timeout=None), timeout_seconds=None))


@functools.lru_cache(maxsize=1024)
def _parse(text: str) -> tuple[Any, ...]:
    configs = [math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig()]
    boxed = rf"\boxed{{{text.strip().strip('$')}}}"
    return tuple(math_verify.parse(boxed, configs, parsing_timeout=None, raise_on_error=True))


verify("x+1", r"\frac{x}{1}+1")
