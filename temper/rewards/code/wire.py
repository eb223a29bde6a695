"""Plain data between a solution and its tests: what is sent from one sandbox to the other, and rebuilt there.

Owns: the wire form of values, of exceptions and of arguments that a call changed. Refuses: importing anything but the
standard library; objects of any class but builtin ones.
"""

from __future__ import annotations

import builtins
import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any

MAX_DEPTH = 64
SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
Wire = Any
"""What JSON holds: scalars as ["int", "0x2a"], containers as ["list", [...]], things elsewhere as ["there", number]."""


class NotPlain(Exception):
    """The value is not made of builtin types alone."""


class TooDeep(NotPlain):
    """It is nested deeper than MAX_DEPTH."""


class Remote:
    """A value that stays in the solution's process: known by the number of the operation that made it, or a name."""

    _place: int | str


class SolutionError(Exception):
    """The solution raised something that is not a builtin exception, ended its process, or gave no answer in time."""


def encode(value: Any, depth: int = 0) -> Wire:
    """Plain data for the wire. Instances of subclasses travel as what they inherit from: a Counter is a dict."""
    if value is None or value is True or value is False:
        return value
    if depth > MAX_DEPTH:
        raise TooDeep("nested too deeply")
    if isinstance(value, Remote):
        return ["there", value._place]
    if isinstance(value, str):
        return ["str", str.__str__(value)]
    if isinstance(value, int):
        return ["int", hex(int.__index__(value))]
    if isinstance(value, float):
        return ["float", float.hex(value)]
    if isinstance(value, complex):
        return ["complex", value.real.hex(), value.imag.hex()]
    if isinstance(value, bytes | bytearray):
        return ["bytes", bytes(value).hex()]
    for name, kind in SEQUENCES.items():
        if isinstance(value, kind):
            items = [encode(item, depth + 1) for item in kind.__iter__(value)]  # type: ignore[attr-defined]
            # Sets of text come in another order in each process.
            return [name, sorted(items, key=json.dumps) if name in ("set", "frozenset") else items]
    if isinstance(value, dict):
        return ["dict", [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in dict.items(value)]]
    if isinstance(value, type) and _is_builtin(value):
        return ["type", value.__name__]
    raise NotPlain(f"{type(value).__name__} is no plain data")


def _is_builtin(kind: type) -> bool:
    return vars(builtins).get(kind.__name__) is kind


def decode(wire: Wire, there: Callable[[Any], Any]) -> Any:
    """Rebuilds plain data; `there` resolves what is not plain."""
    if wire is None or isinstance(wire, bool):
        return wire
    tag, content = wire[0], wire[1]
    if tag in SEQUENCES:
        return SEQUENCES[tag](decode(item, there) for item in content)
    if tag == "dict":
        return {decode(key, there): decode(item, there) for key, item in content}
    if tag == "complex":
        return complex(float.fromhex(content), float.fromhex(wire[2]))
    if tag == "type":
        return _builtin_type(content)
    scalars: dict[str, Callable[[Any], Any]] = {
        "str": str, "int": lambda text: int(text, 16), "float": float.fromhex, "bytes": bytes.fromhex, "there": there
    }  # fmt: skip
    return scalars[tag](content)


def _builtin_type(name: str) -> type:
    found = vars(builtins)[name]
    if not isinstance(found, type):
        raise ValueError(f"{name} is no type")
    return found


def encode_exception(error: BaseException) -> Wire:
    """Names of its class and of those it inherits from, its arguments where they are plain data, its text."""
    arguments, text = None, ""
    with contextlib.suppress(Exception):  # both are the solution's own code
        arguments = encode(list(error.args))
    with contextlib.suppress(Exception):
        text = str(error)[:1000]
    return ["raised", [kind.__name__ for kind in type(error).__mro__], arguments, text]


def decode_exception(answer: Wire, known: Mapping[str, type[Exception]]) -> Exception:
    """The nearest of its classes that is `known` or builtin. A test may expect a ValueError; it never gets a
    SystemExit, nor an AssertionError of the solution's making, nor, unless it is known, a StopIteration: in
    all(map(f, cases)) that would pass for the end of the cases."""
    names, arguments, text = list(map(str, answer[1])), answer[2], str(answer[3])
    given = [text] if arguments is None else decode_answer(arguments)
    for name in names:
        kind = known.get(name) or vars(builtins).get(name)
        if not isinstance(kind, type) or not issubclass(kind, Exception) or issubclass(kind, AssertionError):
            continue
        if issubclass(kind, StopIteration) and name not in known:
            return RuntimeError(f"the solution raised {name}")
        with contextlib.suppress(TypeError):
            return kind(*given)
    return SolutionError(f"{names[0]}: {text}")


def decode_answer(wire: Wire) -> Any:
    """A value that the solution returned: it can name nothing in a process that is gone."""
    return decode(wire, _nothing_there)


def _nothing_there(place: Any) -> Any:
    raise ValueError(f"an answer names {place}")


def update(old: Any, new: Any) -> Any:
    """`old` made equal to `new` in place where both are containers of one mutable type, else `new`: what a call that
    changed its argument did to it. Containers inside stay the same objects where they can."""
    if type(old) is not type(new):
        return new
    if isinstance(old, list):
        old[:] = [update(old[i], item) if i < len(old) else item for i, item in enumerate(new)]
    elif isinstance(old, dict):
        items = {key: update(old[key], item) if key in old else item for key, item in new.items()}
        old.clear()
        old.update(items)
    elif isinstance(old, set):
        old.clear()
        old.update(new)
    else:
        return new
    return old
