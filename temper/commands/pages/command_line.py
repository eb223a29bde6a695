"""docs/reference/cli.md: every verb with its arguments and options, from the application that parses them.

Owns: the page. Refuses: importing the application; it stands above and is handed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from temper.commands.pages.entries import plain, table

INTRO = """# Command line

Written by `temper pages docs`; do not edit. `temper train --help` and so on say the same in the terminal. Without an
active environment it is `.venv/bin/temper`.

| exit code | means |
|---|---|
| 0 | finished, and nothing else |
| 1 | a mistake of Temper's own, with a traceback |
| 2 | a mistake in a recipe, a data file, a checkpoint or an argument: one message that says what to do |
| 3 | a part that broke while it ran |
| 4 | a run that an alarm stopped |
| 130, 143 | a signal; the checkpoint at hand was finished, and the command that resumes is printed |
"""


def command_line_text(command: Any) -> str:
    """`command`: the group of verbs as click has it."""
    return "\n".join([INTRO, *(_verb(name, verb) for name, verb in _verbs(command, "temper"))])


def _verbs(group: Any, before: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):  # a group of verbs
            yield from _verbs(command, f"{before} {name}")
        else:
            yield f"{before} {name}", command


def _verb(name: str, verb: Any) -> str:
    rows = [_row(part) for part in verb.params if part.name != "help"]
    arguments = [_argument(part) for part in verb.params if part.param_type_name == "argument"]
    options = ["[OPTIONS]"] * any(part.param_type_name == "option" for part in verb.params)
    usage = " ".join([name, *options, *arguments])
    lines = [f"## {name}\n", f"{plain(' '.join((verb.help or '').split()))}\n", f"```text\nUsage: {usage}\n```\n"]
    return "\n".join([*lines, *([table(("argument", "default", "meaning"), rows)] if rows else [])])


def _argument(part: Any) -> str:
    name = _value_name(part).removesuffix("...") + ("..." if part.nargs == -1 else "")
    return name if part.required else f"[{name}]"


def _row(part: Any) -> tuple[str, str, str]:
    """Only attributes that every version of typer has: the page must not depend on the one that is installed."""
    if part.param_type_name == "argument":
        shown = _value_name(part)
    else:
        shown = ", ".join([*part.opts, *part.secondary_opts]) + ("" if part.is_flag else f" {_value_name(part)}")
    is_silent = part.default is None or part.default is False or part.default in ("", ())
    default = "required" if part.required else "" if is_silent else f"`{part.default}`"
    return f"`{shown}`", default, plain(part.help or "")


def _value_name(part: Any) -> str:
    return part.metavar or part.name.upper().replace("_", "-")
