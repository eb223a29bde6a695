"""From a recipe file to resolved stages, and every complaint about a key, a value or a line.

Owns: merging of stages and overrides, what is said about mistakes. Refuses: the keys themselves (sections.py).
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from temper.config.beside import look_beside
from temper.config.sections import RunConfig
from temper.errors import UserError, did_you_mean

REPLACED = {
    "objective.lesson": "is called objective.loss now",
    "optim.adam": "is three keys now: optim.beta1, optim.beta2 and optim.epsilon",
    "engine.cuda_graphs": "is called engine.graphs now",
    "model.lora.dropout": "does not exist: the sampler has no dropout, so it would draw from another policy than the "
    "trainer's. Weight decay or a smaller rank also restrain an adapter",
}
"""Keys that recipes once had, or that those of others have, and what to write."""


def load_recipe(path: Path, overrides: Iterable[str] = ()) -> list[RunConfig]:
    """Reads a recipe and returns its stages in order, each fully resolved and validated; files beside it are found."""
    text = _read(path)
    stages = resolve(_parse(text, path), overrides, where=str(path), text=text)
    return [look_beside(config, path.parent) for config in stages]


def read_table(path: Path) -> dict[str, Any]:
    """A recipe as it stands in its file, neither resolved nor checked."""
    return _parse(_read(path), path)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}). Give the path of a recipe, e.g. recipes/demo.toml"
        ) from error


def _parse(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from error


def resolve(table: Mapping[str, Any], overrides: Iterable[str], *, where: str, text: str = "") -> list[RunConfig]:
    """Merges each [[stage]] over the shared keys and validates the result."""
    shared = {key: value for key, value in table.items() if key != "stage" or not isinstance(value, list)}
    stages = table["stage"] if isinstance(table.get("stage"), list) else [{}]
    resolved = []
    for stage in stages:
        merged = merge(shared, {("stage" if key == "kind" else key): value for key, value in stage.items()})
        for override in overrides:
            merged = merge(merged, parse_override(override))
        resolved.append(_validate(merged, where=where, text=text))
    return resolved


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Tables merge key by key; everything else is replaced. What cannot stand together replaces each other."""
    out = dict(below)
    for key, value in above.items():
        is_table = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = merge(_room_for(key, out[key], value), value) if is_table else value
    return out


def _room_for(key: str, below: Mapping[str, Any], above: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is left of a table under one that names another origin: a file's rows are not cut to a generator's size."""
    if key == "heldout" and {"path", "generator"} & above.keys() - below.keys():
        return {}
    if key == "model" and ("path" in above) != ("new" in above):
        return {name: value for name, value in below.items() if name != ("new" if "path" in above else "path")}
    return below


def parse_override(text: str) -> dict[str, Any]:
    """'a.b=c' as nested tables. The value is read as TOML, and as plain text when that fails."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise UserError(f"--set {text!r} is not of the form key=value, e.g. --set optim.learning_rate=1e-5")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    for part in reversed(key.strip().split(".")):
        parsed = {part: parsed}
    return cast(dict[str, Any], parsed)


def _validate(merged: Mapping[str, Any], *, where: str, text: str) -> RunConfig:
    try:
        return RunConfig.model_validate(merged)
    except ValidationError as error:
        problems = [_explain(problem, where, text) for problem in error.errors()]
        raise UserError("\n".join(problems)) from error


def _explain(problem: Mapping[str, Any], where: str, text: str) -> str:
    """One validation problem as a sentence with the place, the value and the nearest allowed name."""
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location)
    line = _line_of(location[-1], text) if location else None
    place = f"{where}, line {line}" if line else where
    if problem["type"] == "extra_forbidden":
        allowed = sorted(_fields_at(location[:-1]))
        if key in REPLACED:
            return f'{place}: key "{key}" {REPLACED[key]}.'
        return (
            f'{place}: key "{key}" is unknown.{did_you_mean(location[-1], allowed)} Allowed here: {", ".join(allowed)}.'
        )
    message = str(problem["msg"]).removeprefix("Value error, ")
    given = "" if problem["type"] in ("value_error", "missing") else f" (got {problem['input']!r})"
    return f"{place}: {f'{key}: ' if key else ''}{message}{given}."


def _line_of(key: str, text: str) -> int | None:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.split("=")[0].strip() == key or line.strip().strip("[]").split(".")[-1] == key:
            return number
    return None


def _fields_at(location: Iterable[str]) -> set[str]:
    """Names allowed at a place in the configuration."""
    section: type[BaseModel] = RunConfig
    for part in location:
        if part.isdigit():
            continue
        inner = section_of(section.model_fields[part].annotation)
        if inner is None:
            return set()
        section = inner
    return set(section.model_fields)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section class inside an annotation such as `Section`, `Section | None` or `list[Section]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        if (found := section_of(inner)) is not None:
            return found
    return None
