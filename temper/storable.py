"""Text and values that any file, database and screen takes, whatever a model, an environment or a reward said.

Owns: what becomes of characters and numbers that cannot be written: a visible escape, never a failure.
Refuses: cutting, translating, judging; what can be written stays as it is.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

UNWRITABLE = re.compile("[\ud800-\udfff\x00]")
"""Halves of characters, which no encoding has, and NUL, at which SQLite's own functions end a text."""
HALVES = re.compile("[\ud800-\udfff]")
WHOLE_NUMBERS = range(-(2**63), 2**63)
"""That SQLite has."""
# One encoder for all: json.dumps with options makes a new one per call, a tenth of the cost of a rollout.
_encode = json.JSONEncoder(ensure_ascii=False, sort_keys=True).encode


def storable_text(text: str) -> str:
    r"""The text with visible escapes, "\ud83d" and "\x00", for what cannot be written."""
    if text.isascii() and "\x00" not in text:
        return text
    return UNWRITABLE.sub(lambda found: rf"\u{ord(found[0]):04x}" if found[0] != "\x00" else r"\x00", text)


def without_halves(text: str) -> str:
    """The text with visible escapes for halves of characters, which no tokenizer takes."""
    return text if text.isascii() else HALVES.sub(lambda found: rf"\u{ord(found[0]):04x}", text)


def storable(value: Any) -> Any:
    """A value of a database's column: text is made storable, and what is no number, text or bytes is written out."""
    if value is None or isinstance(value, float | bytes):
        return value
    if isinstance(value, int):
        return value if value in WHOLE_NUMBERS else as_float(value)
    return storable_text(value if isinstance(value, str) else written_out(value))


def written_out(value: object) -> str:
    """Its text; of what has none, its type: not every object of a user can be written out."""
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__name__}>"


def as_float(value: float) -> float:
    """A number as a float; a whole number too large for one is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def to_json(value: Any) -> str:
    """JSON of anything, by sorted keys: what JSON cannot say is written out as text."""
    try:
        return storable_json(_encode(value))
    except (TypeError, ValueError, RecursionError):
        return storable_json(_encode(_plain(value, depth=0)))


def storable_json(text: str) -> str:
    """JSON whose texts, read back, have visible escapes for halves of characters."""
    return text if text.isascii() else HALVES.sub(lambda found: rf"\\u{ord(found[0]):04x}", text)


MAX_DEPTH = 64


def _plain(value: Any, depth: int) -> Any:
    """A copy that JSON can say."""
    if depth > MAX_DEPTH:
        return "..."
    if isinstance(value, dict):
        return {_key(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    if value is None or isinstance(value, str | bool | float):
        return value
    if isinstance(value, int):
        return value if value in WHOLE_NUMBERS else as_float(value)
    return written_out(value)


def _key(key: Any) -> str:
    return key if isinstance(key, str) else written_out(_plain(key, MAX_DEPTH))
