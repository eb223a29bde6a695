"""From a recipe file to resolved stages.

Owns: reading, merging of stages and of --set. Refuses: the keys themselves (sections.py), what is said about mistakes
in them (complaints.py).
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from temper.config.beside import look_beside
from temper.config.complaints import RecipeText, explain_mistakes
from temper.config.sections import RunConfig
from temper.errors import UserError, nearest_file


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
        near = "" if path.exists() else nearest_file(path)
        raise UserError(
            f"{path}: cannot be read ({error.strerror}).{near} Give the path of a recipe, e.g. recipes/demo.toml; "
            '"temper init FOLDER" writes one to start from'
        ) from error


def _parse(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from error


def resolve(table: Mapping[str, Any], overrides: Iterable[str], *, where: str, text: str = "") -> list[RunConfig]:
    """Merges each [[stage]] over the shared keys, and overrides over both, and validates the result."""
    shared = {key: value for key, value in table.items() if key != "stage" or not isinstance(value, list)}
    stages = table["stage"] if isinstance(table.get("stage"), list) else [{}]
    changes = [parse_override(override) for override in overrides]
    for change in changes:
        _require_stage(change, len(stages))
    resolved = []
    for number, stage in enumerate(stages, start=1):
        merged = merge(shared, _with_kind(stage))
        for change in changes:
            merged = merge(merged, _part_for(number, change))
        try:
            resolved.append(RunConfig.model_validate(merged))
        except ValidationError as error:
            source = RecipeText(where=where, text=text, overrides=tuple(overrides))
            stage_named = f"stage {number}" if len(stages) > 1 else ""
            raise UserError(explain_mistakes(error.errors(), source, stage_named)) from error
    return resolved


def _with_kind(stage: Mapping[str, Any]) -> dict[str, Any]:
    """In a [[stage]] table the key `stage` is called `kind`."""
    return {("stage" if key == "kind" else key): value for key, value in stage.items()}


def _part_for(number: int, change: Mapping[str, Any]) -> Mapping[str, Any]:
    """What an override says of that stage: "stage.2.steps=5" speaks of the second alone, all others of every stage."""
    if not isinstance(change.get("stage"), Mapping):
        return change
    return _with_kind(change["stage"].get(str(number), {}))


def _require_stage(change: Mapping[str, Any], num_stages: int) -> None:
    addressed = change.get("stage")
    if not isinstance(addressed, Mapping):
        return
    for name, keys in addressed.items():
        if not name.isdecimal() or not 1 <= int(name) <= num_stages or not isinstance(keys, Mapping):
            raise UserError(
                f"--set stage.{name}: one stage is addressed by its number and a key, and there "
                f"{'is 1 stage' if num_stages == 1 else f'are {num_stages} stages'}, e.g. "
                f"--set stage.{num_stages}.optim.learning_rate=1e-5"
            )


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
        raise UserError(
            f"--set {text!r} is not of the form key=value, e.g. --set optim.learning_rate=1e-5, or "
            "--set stage.2.steps=50 for the second stage alone"
        )
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    for part in reversed(key.strip().split(".")):
        parsed = {part: parsed}
    return cast(dict[str, Any], parsed)
