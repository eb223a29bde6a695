"""Resolved stages as TOML text: what a run stores, and what starts it again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from temper.config.sections import RunConfig


def to_toml(stages: Iterable[RunConfig]) -> str:
    """Resolved stages as TOML that load_recipe reads back to the same value."""
    lines: list[str] = []
    for config in stages:
        table = config.model_dump(exclude_none=True)
        lines += ["[[stage]]", *_toml_lines({"kind": table.pop("stage"), **table}, prefix="stage."), ""]
    return "\n".join(lines)


def _toml_lines(table: Mapping[str, Any], prefix: str) -> list[str]:
    plain = {key: value for key, value in table.items() if not isinstance(value, dict) and not _is_tables(value)}
    lines = [f"{key} = {to_toml_value(value)}" for key, value in plain.items()]
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            lines += ["", f"[{name}]", *_toml_lines(value, prefix=f"{name}.")]
        elif _is_tables(value):
            for item in value:
                lines += ["", f"[[{name}]]", *_toml_lines(item, prefix=f"{name}.")]
    return lines


def _is_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, dict) for item in value)


def to_toml_value(value: Any) -> str:
    """One value as TOML writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {to_toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped) + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(to_toml_value(item) for item in value) + "]"
    return repr(value)
