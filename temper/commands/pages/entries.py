"""How pages of the reference say a thing: its name with settings, what stands in its docstring, tables.

Owns: Markdown that reads the same on a forge and on the site. Refuses: knowing what it describes.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

CODE = re.compile(r"(`[^`]*`)")
"""Code inside a line."""
FENCE = "\0"
"""Stands for three ticks while the rest is looked at."""


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def plain(text: str) -> str:
    """A docstring as Markdown: tags, stars and fences in it are text."""
    parts = CODE.split(text.replace("```", FENCE))
    shown = [part if part.startswith("`") else part.replace("<", "&lt;").replace("*", "\\*") for part in parts]
    return "".join(shown).replace(FENCE, "\\`\\`\\`")


def first_line(text: str) -> str:
    """The first sentence of a docstring, in one line."""
    return plain(" ".join(text.partition("\n\n")[0].split()))


def settings(build: Callable[..., Any], without: Sequence[str] = ()) -> list[tuple[str, str]]:
    """(name, default) of what a recipe may set; an option without a default is "required"."""
    kept = [p for p in inspect.signature(build).parameters.values() if p.name not in without]
    return [
        (p.name, "required" if p.default is p.empty else repr(p.default))
        for p in kept
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def options_line(build: Callable[..., Any], further: str, without: Sequence[str] = ()) -> str:
    """The settings in one line of Markdown; `further` says what a function with **options takes besides."""
    named = [f"`{name}` ({default})" for name, default in settings(build, without)]
    passes_on = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(build).parameters.values())
    named += [further] * passes_on
    return f"Options: {', '.join(named)}." if named else "No options."


def doc_of(build: Callable[..., Any]) -> str:
    """What a function or class says of itself, and what its constructor says of its options."""
    target = build.func if isinstance(build, functools.partial) else build
    own = inspect.getdoc(target) or ""
    made = target.__init__ if inspect.isclass(target) else None
    inner = made.__doc__ if made is not None and inspect.isfunction(made) else None
    return "\n\n".join(filter(None, [own, inspect.cleandoc(inner) if inner else ""]))


def definition(value: Any) -> ast.stmt:
    """What the source of a class or function says."""
    return ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]


def fields_of(cls: type) -> Iterator[str]:
    """One line of Markdown for each field of a class: its type, its default and the text under it."""
    node = definition(cls)
    assert isinstance(node, ast.ClassDef)
    for part, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(part, ast.AnnAssign) or ast.unparse(part.target).startswith("_"):
            continue
        default = f" = {ast.unparse(part.value)}" if part.value is not None else ""
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            text = f": {plain(' '.join(after.value.value.split()))}"
        yield f"- `{ast.unparse(part.target)}: {ast.unparse(part.annotation)}{default}`{text}"
