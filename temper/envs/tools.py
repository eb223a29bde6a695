"""Tools: Python functions with a JSON schema, an effect and a deadline.

Owns: the schema of a signature, the check of arguments against it, the reading of plain calls. Refuses: silent
coercion ("3" is not an integer), running anything (tool_env.py).
"""

from __future__ import annotations

import difflib
import inspect
import json
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Union, get_args, get_origin

from temper.envs.tool_calls import Call
from temper.errors import UserError

Effect = Literal["read", "write", "irreversible"]
"""What a call can change: nothing; something that can be put back, e.g. the episode's state; the world, for good."""
EFFECTS: tuple[str, ...] = get_args(Effect)
_SCALARS: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_PYTHON: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,),
    "object": (dict,), "null": (type(None),),
}  # fmt: skip


class ToolError(Exception):
    """Raised by a tool to tell the policy, in its own words, why the call failed."""


class ToolTimeout(ToolError):
    """Raised by a tool that keeps a deadline of its own and ended the work in time, e.g. with its process."""


class ArgumentsRefused(ValueError):
    """A call that names no tool, or whose arguments do not fit. The message is for the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One thing a policy may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of an object."""
    run: Callable[..., Any]
    """Called with the arguments by name; sync (then in a thread) or async."""
    effect: Effect = "read"
    seconds: float = 10.0
    """Deadline of one call."""
    cost: float = 0.0
    """Cost of one call, in whatever unit the environment charges."""
    secrets: tuple[str, ...] = ()
    """Arguments that the policy neither sees nor gives: filled in by name from Permissions.secrets."""

    def __post_init__(self) -> None:
        if self.effect not in EFFECTS:
            raise UserError(f"tool {self.name}: effect {self.effect!r} is unknown. Known: {', '.join(EFFECTS)}.")
        if not re.fullmatch(r"[A-Za-z_][\w.-]{0,63}", self.name):
            raise UserError(f"tool {self.name!r}: a name is letters, digits, '_', '.', '-', at most 64 of them.")
        if self.seconds <= 0:
            raise UserError(f"tool {self.name}: seconds={self.seconds} must be more than 0.")

    @property
    def schema(self) -> dict[str, Any]:
        """As OpenAI's interface and Hugging Face's chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def make_tool(
    function: Callable[..., Any],
    *,
    name: str = "",
    effect: Effect = "read",
    seconds: float = 10.0,
    cost: float = 0.0,
    secrets: Sequence[str] = (),
) -> Tool:
    """The function as a tool: types from its annotations, words from its docstring ("argument: what it is")."""
    title = name or function.__name__
    description, notes = _read_docstring(inspect.getdoc(function) or "")
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except NameError as error:
        raise UserError(
            f"tool {title}: an annotation cannot be resolved ({error}). Import it in its module."
        ) from error
    if missing := [secret for secret in secrets if secret not in parameters]:
        raise UserError(f"tool {title}: secret {missing[0]!r} is no argument of the function. Add it.")
    shown = {key: parameter for key, parameter in parameters.items() if key not in secrets}
    properties = {key: _property(title, parameter, notes.get(key, "")) for key, parameter in shown.items()}
    schema = {
        "type": "object",
        "properties": properties,
        "required": [key for key, parameter in shown.items() if parameter.default is parameter.empty],
        "additionalProperties": False,
    }
    return Tool(
        name=title,
        description=description,
        parameters=schema,
        run=function,
        effect=effect,
        seconds=seconds,
        cost=cost,
        secrets=tuple(secrets),
    )


def tool(
    *, name: str = "", effect: Effect = "read", seconds: float = 10.0, cost: float = 0.0, secrets: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Tool]:
    """@tool(effect="write", seconds=2): the function below becomes a Tool."""
    return lambda function: make_tool(function, name=name, effect=effect, seconds=seconds, cost=cost, secrets=secrets)


class ToolSet:
    """The tools of one environment, by name."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._tools: dict[str, Tool] = {}
        for item in tools:
            if item.name in self._tools:
                raise UserError(f"two tools are named {item.name!r}. Give one of them another name=.")
            self._tools[item.name] = item

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    @property
    def schemas(self) -> tuple[dict[str, Any], ...]:
        return tuple(item.schema for item in self)

    def bind(self, call: Call) -> tuple[Tool, dict[str, Any]]:
        """The tool and the checked arguments. Raises ArgumentsRefused with what the policy should know."""
        found = self._tools.get(call.name)
        if found is None:
            near = difflib.get_close_matches(call.name, self._tools, n=1, cutoff=0.5)
            hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(sorted(self._tools))}"
            raise ArgumentsRefused(f"there is no tool '{call.name:.64}', {hint}")
        schema = found.parameters
        arguments = _read_plain(call.arguments, schema) if isinstance(call.arguments, str) else dict(call.arguments)
        if (problem := mismatch(arguments, schema)) is not None:
            raise ArgumentsRefused(f"{call.name}: {problem}")
        return found, arguments


def named_arguments(call: Call, schemas: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The arguments by name; those of a plain call as the schema of its tool reads them. Raises ArgumentsRefused."""
    if not isinstance(call.arguments, str):
        return call.arguments
    for schema in schemas:
        if schema["function"]["name"] == call.name:
            return _read_plain(call.arguments, schema["function"].get("parameters", {}))
    raise ArgumentsRefused(f"there is no tool '{call.name:.64}'")


def mismatch(value: Any, schema: Mapping[str, Any], where: str = "") -> str | None:
    """Why the value does not fit the schema, or None. Nothing is coerced: true is not an integer, nor is 3.0.

    Checked: type, enum, anyOf, minimum, maximum, items, properties, required, additionalProperties. Other words of JSON
    Schema, which only schemas from elsewhere have, are left to the tool.
    """
    title = f"argument '{where}'" if where else "the arguments"
    if "anyOf" in schema:
        if all(mismatch(value, option, where) is not None for option in schema["anyOf"]):
            return f"{title} fits none of the allowed types, got {_shown(value)}"
        return None
    allowed = schema.get("type", [])
    allowed = [allowed] if isinstance(allowed, str) else allowed
    if allowed and not any(_is_of(value, name) for name in allowed):
        return f"{title} must be of type {' or '.join(allowed)}, got {_shown(value)}"
    if "enum" in schema and not any(value == option and type(value) is type(option) for option in schema["enum"]):
        return f"{title} must be one of {', '.join(map(_shown, schema['enum']))}, got {_shown(value)}"
    if "minimum" in schema and _is_of(value, "number") and value < schema["minimum"]:
        return f"{title} must be at least {schema['minimum']}, got {value}"
    if "maximum" in schema and _is_of(value, "number") and value > schema["maximum"]:
        return f"{title} must be at most {schema['maximum']}, got {value}"
    if isinstance(value, list) and "items" in schema:
        problems = (mismatch(item, schema["items"], f"{where} {place + 1}") for place, item in enumerate(value))
        return next((problem for problem in problems if problem is not None), None)
    return _object_mismatch(value, schema, where) if isinstance(value, dict) else None


def _object_mismatch(value: dict[str, Any], schema: Mapping[str, Any], where: str) -> str | None:
    properties: Mapping[str, Any] = schema.get("properties", {})
    for key in schema.get("required", ()):
        if key not in value:
            return f"argument '{key}' is missing"
    for key, item in value.items():
        if key in properties:
            if (problem := mismatch(item, properties[key], f"{where} {key}".strip())) is not None:
                return problem
        elif schema.get("additionalProperties") is False:
            return f"argument '{key}' is unknown, known: {', '.join(properties) or 'none'}"
    return None


def _is_of(value: Any, name: str) -> bool:
    return isinstance(value, _PYTHON.get(name, ())) and (name == "boolean" or not isinstance(value, bool))


def _shown(value: Any) -> str:
    text = f"'{value}'" if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _property(title: str, parameter: inspect.Parameter, note: str) -> dict[str, Any]:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        raise UserError(f"tool {title}: argument {parameter} cannot be given by name. Write plain arguments.")
    schema = _type_schema(parameter.annotation)
    if schema is None:
        raise UserError(
            f"tool {title}: argument {parameter.name} is annotated {parameter.annotation!r}. Use str, int, float, "
            "bool, list[...], dict, Literal[...] or one of these with None."
        )
    if note:
        schema["description"] = note
    if parameter.default is not parameter.empty:
        if (problem := mismatch(parameter.default, schema, parameter.name)) is not None:
            raise UserError(f"tool {title}: the default of {problem}")
        schema["default"] = parameter.default
    return schema


def _type_schema(annotation: Any) -> dict[str, Any] | None:
    """JSON schema of a type hint; None when it has none."""
    if annotation in _SCALARS:
        return {"type": _SCALARS[annotation]}
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is list or origin is list:
        items = _type_schema(arguments[0]) if arguments else {}
        return None if items is None else {"type": "array", **({"items": items} if items else {})}
    if annotation is dict or origin is dict:
        return {"type": "object"}
    if origin is Literal:
        names = sorted({_SCALARS[type(value)] for value in arguments if type(value) in _SCALARS})
        return {"type": names[0] if len(names) == 1 else names, "enum": list(arguments)}
    if origin in (Union, types.UnionType) and type(None) in arguments and len(arguments) == 2:
        inner = _type_schema(next(part for part in arguments if part is not type(None)))
        if inner is None or not isinstance(inner["type"], str):
            return None
        inner["type"] = [inner["type"], "null"]
        return {**inner, "enum": [*inner["enum"], None]} if "enum" in inner else inner
    return None


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """(the first paragraph, what it says of each argument in lines such as "argument: what it is")."""
    first, _, rest = text.partition("\n\n")
    notes = re.findall(r"^\s*(?::param\s+)?(\w+)(?:\s*\([^)]*\))?:[ \t]+(\S.*)$", rest, flags=re.MULTILINE)
    return " ".join(first.split()), dict(notes)


def _read_plain(text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of name(text). Plain text has no types, so each argument is read as what the schema wants there."""
    properties: Mapping[str, Any] = schema.get("properties", {})
    names = list(properties)
    if not text:
        return {}
    # A lone argument takes all of the text as its value: an expression or a program has commas of its own.
    parts = [text] if len(names) == 1 else _split(text)
    if len(parts) > len(names):
        raise ArgumentsRefused(f"{len(parts)} arguments were given, at most {len(names)} are known: {', '.join(names)}")
    arguments: dict[str, Any] = {}
    for place, part in enumerate(parts):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in properties:
            key, value = names[place], part.strip()
        if key in arguments:
            raise ArgumentsRefused(f"argument '{key}' was given twice")
        arguments[key] = _read_value(value, properties[key])
    return arguments


def _split(text: str) -> list[str]:
    """At commas outside of quotes and brackets."""
    cuts, depth, quote = [-1], 0, ""
    for place, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            cuts.append(place)
    return [text[start + 1 : end] for start, end in pairwise([*cuts, len(text)])]


def _read_value(text: str, schema: Mapping[str, Any]) -> Any:
    wanted = schema.get("type", "string")
    wanted = [wanted] if isinstance(wanted, str) else wanted
    if "string" in wanted and not ("null" in wanted and text in ("null", "none")):
        is_quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" and text[0] not in text[1:-1]
        return text[1:-1] if is_quoted else text
    words = {"true": "true", "false": "false", "none": "null"}
    try:
        return json.loads(words.get(text.lower(), text))
    except (ValueError, RecursionError):
        return text  # the check against the schema says what is wrong with it
