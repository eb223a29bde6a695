"""docs/reference/python.md: every name of `import temper`, with signatures and what stands under them.

Owns: the page, read from the source of what the package exports. Refuses: importing it; the door stands above
everything else, and is handed over.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from temper.commands.pages.entries import definition, fields_of, plain

INTRO = """# Python

Written by `temper pages docs`; do not edit. How they are used, and a table for those who come from TRL:
[from Python](../python.md). Every further argument of `temper.train` is [a key of a recipe](../recipe.md).
"""


def python_text(package: ModuleType) -> str:
    names = [name for name in package.__all__ if not name.startswith("_")]
    ordered = sorted(names, key=lambda name: (name[0].isupper(), name))
    return "\n".join([INTRO, *(_entry(name, getattr(package, name)) for name in ordered)])


def _entry(name: str, value: Any) -> str:
    if isinstance(value, type):
        lines = [f"## {name}\n", f"{plain(inspect.getdoc(value) or '')}\n", *_members(value)]
    else:
        node = definition(value)
        assert isinstance(node, ast.FunctionDef)
        lines = [f"## {name}\n", _signature(node, f"temper.{name}"), f"{plain(inspect.getdoc(value) or '')}\n"]
    return "\n".join(lines)


def _members(cls: type) -> Iterator[str]:
    """Fields with the text under them, then properties and methods."""
    yield from fields_of(cls)
    node = definition(cls)
    assert isinstance(node, ast.ClassDef)
    for part in node.body:
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and not part.name.startswith("_"):
            is_property = any(ast.unparse(decorator) == "property" for decorator in part.decorator_list)
            text = plain(" ".join((ast.get_docstring(part) or "").split()))
            yield f"- `{_property(part) if is_property else _line(part, part.name)}`" + (f": {text}" if text else "")
    yield ""


def _property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return f"{node.name}: {ast.unparse(node.returns)}" if node.returns else node.name


def _line(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> str:
    """The signature in one line."""
    arguments = re.sub(r"^(self|cls)(, )?", "", ast.unparse(node.args))
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{'async ' if isinstance(node, ast.AsyncFunctionDef) else ''}{name}({arguments}){returned}"


def _signature(node: ast.FunctionDef, name: str) -> str:
    """One argument to a line."""
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    arguments = ",\n    ".join(_split(ast.unparse(node.args)))
    return f"```python\n{name}(\n    {arguments},\n){returned}\n```\n"


def _split(arguments: str) -> list[str]:
    """At the commas that separate arguments."""
    depth, parts = 0, [""]
    for sign in arguments:
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]
