"""The commonly used part of JSON Schema, checked without a dependency.

Owns: which keywords are understood, and whether a value fits. Refuses: keywords that it does not know, when the schema
is read and not when a response is judged; and matching patterns, which are handed out to be run in a worker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from temper.errors import UserError, did_you_mean
from temper.rewards.form.visible import visible

MAX_CHARACTERS = 1 << 20
Search = tuple[str, str]
"""A pattern that must be found in a text."""


class NoJson:
    """Stands for a response that is not JSON. None would not do: it is the JSON null."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


TYPES: dict[str, Callable[[Any], bool]] = {
    "array": lambda value: isinstance(value, list),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _is_number(value) and value == value // 1,
    "null": lambda value: value is None,
    "number": _is_number,
    "object": lambda value: isinstance(value, dict),
    "string": lambda value: isinstance(value, str),
}

LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "minimum": ("number", lambda value, limit: value >= limit),
    "maximum": ("number", lambda value, limit: value <= limit),
    "minLength": ("string", lambda value, limit: len(visible(value)) >= limit),
    "maxLength": ("string", lambda value, limit: len(value) <= limit),
    "minItems": ("array", lambda value, limit: len(value) >= limit),
    "maxItems": ("array", lambda value, limit: len(value) <= limit),
}
"""Keyword -> the type it is about (values of other types are not its business), and the comparison. Characters that
show nothing make no text longer."""

KEYWORDS = frozenset(
    {"type", "properties", "required", "items", "enum", "const", "pattern", "additionalProperties", *LIMITS}
)
ANNOTATIONS = frozenset({"$schema", "title", "description", "default", "examples"})
"""Say nothing about what fits."""


class JsonSchema:
    """A schema, read and checked once: `Schema('{"type": "integer"}').fits(5) == (True, [])`."""

    def __init__(self, text: str) -> None:
        try:
            self._schema = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f'reward "json_schema": the schema is no valid JSON: {error}') from error
        _require_schema(self._schema, "schema")

    def fits(self, value: Any) -> tuple[bool, list[Search]]:
        """Whether it fits, patterns apart; and the patterns that must be found for it to fit."""
        searches: list[Search] = []
        fits = not isinstance(value, NoJson) and all(_verdicts(self._schema, value, searches))
        return fits, searches if fits else []


def find_json(text: str) -> Any:
    """The response as JSON, alone or as one ```json fence around all of it. A repeated key makes it none."""
    text = text.strip()
    if text.startswith(("```json\n", "```\n")) and text.endswith("\n```"):
        text = text.partition("\n")[2][: -len("\n```")]
    if len(text) > MAX_CHARACTERS:
        return NoJson()
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return NoJson()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key is there twice")
    return made


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _verdicts(schema: Any, value: Any, searches: list[Search]) -> Iterator[bool]:
    if isinstance(schema, bool):
        yield schema
        return
    if "type" in schema:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        yield any(TYPES[name](value) for name in names)
    if "enum" in schema:
        yield any(_equal(value, option) for option in schema["enum"])
    if "const" in schema:
        yield _equal(value, schema["const"])
    for keyword, (kind, is_within) in LIMITS.items():
        if keyword in schema and TYPES[kind](value):
            yield is_within(value, schema[keyword])
    if "pattern" in schema and isinstance(value, str):
        searches += [(schema["pattern"], value), (schema["pattern"], visible(value))]
    if isinstance(value, dict):
        yield from _object_verdicts(schema, value, searches)
    if isinstance(value, list) and "items" in schema:
        for item in value:
            yield from _verdicts(schema["items"], item, searches)


def _object_verdicts(schema: Any, value: dict[str, Any], searches: list[Search]) -> Iterator[bool]:
    yield all(name in value for name in schema.get("required", ()))
    properties = schema.get("properties", {})
    for name, item in value.items():
        yield from _verdicts(properties.get(name, schema.get("additionalProperties", True)), item, searches)


def _equal(left: Any, right: Any) -> bool:
    """JSON's equality: true is not 1, also deep inside."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_equal, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    return bool(left == right)


def _require_schema(schema: Any, where: str) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise _mistake(where, f"is {schema!r:.60}; it must be an object, true or false")
    for keyword in schema:
        if keyword not in KEYWORDS | ANNOTATIONS:
            known = ", ".join(sorted(KEYWORDS))
            raise _mistake(where, f'has "{keyword}".{did_you_mean(keyword, KEYWORDS)} Understood are: {known}')
    _require_keywords(schema, where)
    for name, part in schema.get("properties", {}).items():
        _require_schema(part, f"{where}.properties.{name}")
    for keyword in ("items", "additionalProperties"):
        _require_schema(schema.get(keyword, True), f"{where}.{keyword}")


def _require_keywords(schema: dict[str, Any], where: str) -> None:
    names = schema.get("type", [])
    for name in names if isinstance(names, list) else [names]:
        if name not in TYPES:
            raise _mistake(where, f"has type {name!r}; allowed: {', '.join(TYPES)}")
    if not isinstance(schema.get("properties", {}), dict):
        raise _mistake(where, "has properties that are no object")
    for keyword in ("required", "enum"):
        if not isinstance(schema.get(keyword, []), list):
            raise _mistake(where, f"has {keyword} that is no list")
    for keyword in LIMITS:
        if not _is_number(schema.get(keyword, 0)):
            raise _mistake(where, f"has {keyword} that is no number")
    try:
        re.compile(schema.get("pattern", ""))
    except (re.error, TypeError) as error:
        raise _mistake(where, f"has pattern {schema['pattern']!r}, which is no regular expression: {error}") from error


def _mistake(where: str, what: str) -> UserError:
    return UserError(f'reward "json_schema": {where} {what}.')
