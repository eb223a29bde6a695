"""The recipes that runs keep: what is in one, what differs between several, what differs from the defaults.

Owns: config.toml of a run as flat keys by kind of stage ("rl.optim.learning_rate"). Refuses: the stages' numbers; two
runs are compared where they do the same thing, not where it happens to stand.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from temper.config import RunConfig, section_of

CONFIG = "config.toml"
SEED = "seed"
LABELS = (SEED, "name")
"""Keys that name a run rather than what it does: runs that differ in these alone are seeds of one recipe."""
NOT_GIVEN = None
"""A key that the defaults do not have: the recipe must give it, or another version of Temper knew it."""

Flat = Mapping[str, Any]


def recipe_text(folder: Path) -> str:
    """Raises OSError when the run keeps none."""
    return (folder / CONFIG).read_text(encoding="utf-8")


def recipe_stages(folder: Path) -> list[dict[str, Any]]:
    """Its [[stage]] tables; empty when there is no recipe, or none that can be read."""
    try:
        facts = (folder / CONFIG).stat()
        return _stages(folder, facts.st_mtime_ns, facts.st_size)
    except OSError:
        return []


@lru_cache(maxsize=512)
def _stages(folder: Path, changed: int, size: int) -> list[dict[str, Any]]:
    """Kept as long as the file stays as it is: a table of runs asks for all of them every few seconds."""
    try:
        stages = tomllib.loads(recipe_text(folder)).get("stage", [])
    except (ValueError, RecursionError):  # not TOML, or not UTF-8
        return []
    return [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []


def kinds_of(stages: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each stage is called: its kind, with a number from the second of that kind on."""
    seen: Counter[str] = Counter()
    names = []
    for stage in stages:
        kind = str(stage.get("kind", "stage"))
        seen[kind] += 1
        names.append(kind if seen[kind] == 1 else f"{kind} {seen[kind]}")
    return names


def flatten(stages: Sequence[Mapping[str, Any]]) -> dict[str, Flat]:
    """By kind of stage: every key and its value."""
    return {kind: dict(_flat(stage, "")) for kind, stage in zip(kinds_of(stages), stages, strict=True)}


def _flat(value: Any, name: str) -> list[tuple[str, Any]]:
    items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else None
    if items is None or (isinstance(value, list) and not any(isinstance(item, dict) for item in value)):
        return [(name, value)]
    return [pair for key, item in items for pair in _flat(item, f"{name}.{key}" if name else str(key))]


def seed_group(stages: Sequence[Mapping[str, Any]]) -> str:
    """Equal for recipes that differ in their seed alone; empty without a recipe."""
    if not stages:
        return ""
    rest = [{key: value for key, value in stage.items() if key not in LABELS} for stage in stages]
    return hashlib.sha256(json.dumps(rest, sort_keys=True, default=str).encode()).hexdigest()[:12]


def differing(recipes: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Keys whose values are not equal in all runs, and by run its values of them.

    A stage is compared among the runs that have it; which stages there are is a key of its own, "stages". So is a table
    that some runs lack, e.g. "model.new". A key that has one value in all stages of every run is shown once, without
    the stage before it.
    """
    read = {run: flatten(stages) for run, stages in recipes.items() if stages}
    values: dict[str, dict[str, Any]] = {run: {} for run in recipes}
    keys = _note_if_different("stages", {run: " → ".join(stages) for run, stages in read.items()}, values)
    for key in dict.fromkeys(key for stages in read.values() for stage in stages.values() for key in stage):
        if key in ("name", "kind"):
            continue
        shared = {run: next(iter(stages.values())) for run, stages in read.items()}
        by_kind = {
            f"{kind}.": {run: stages[kind] for run, stages in read.items() if kind in stages}
            for kind in dict.fromkeys(kind for stages in read.values() for kind in stages)
        }
        for prefix, tables in {"": shared}.items() if _is_shared(key, read) else by_kind.items():
            for name, found in _compared(key, tables):
                keys += _note_if_different(f"{prefix}{name}", found, values)
    return list(dict.fromkeys(keys)), values


def _is_shared(key: str, read: Mapping[str, Mapping[str, Flat]]) -> bool:
    return all(len({json.dumps(stage.get(key), default=str) for stage in run.values()}) == 1 for run in read.values())


def _compared(key: str, tables: Mapping[str, Flat]) -> list[tuple[str, dict[str, Any]]]:
    """(name, values by run): of the key, and of its table where only some runs have that."""
    parent = key.rpartition(".")[0]
    inside = {
        run: {name.removeprefix(f"{parent}."): value for name, value in table.items() if name.startswith(f"{parent}.")}
        for run, table in tables.items()
    }
    has = [run for run in tables if inside[run]] if parent else list(tables)
    rows = [(key, {run: tables[run].get(key) for run in has})]
    return rows if len(has) in (0, len(tables)) else [(parent, {run: inside[run] or None for run in tables}), *rows]


def _note_if_different(key: str, found: Mapping[str, Any], values: dict[str, dict[str, Any]]) -> list[str]:
    if len({json.dumps(value, default=str, sort_keys=True) for value in found.values()}) < 2:
        return []
    for run, value in found.items():
        values[run][key] = value
    return [key]


def difference(one: Path, other: Path) -> list[dict[str, Any]]:
    """Keys whose values differ between two runs; None where a run does not have the key."""
    keys, values = differing({"a": recipe_stages(one), "b": recipe_stages(other)})
    return [{"key": key, "a": values["a"].get(key), "b": values["b"].get(key)} for key in keys]


def changed(stages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What a recipe says that the defaults do not: {stage, key, value, default}; stage "": the same in every stage."""
    tables = list(stages)
    found: dict[str, dict[str, tuple[Any, Any]]] = {}
    for kind, stage in zip(kinds_of(tables), tables, strict=True):
        table = {key: value for key, value in stage.items() if key not in ("kind", "name")}
        for key, value, usual in _changed(RunConfig, _defaults(RunConfig), table, ""):
            found.setdefault(key, {})[kind] = (value, usual)
    rows = []
    for key, by_kind in found.items():
        is_everywhere = len(tables) > 1 and len(by_kind) == len(tables) and _all_equal(by_kind.values())
        chosen = {"": next(iter(by_kind.values()))} if is_everywhere else by_kind
        rows += [{"stage": kind, "key": key, "value": v, "default": d} for kind, (v, d) in chosen.items()]
    return rows


def _all_equal(values: Iterable[Any]) -> bool:
    first, *rest = values
    return all(value == first for value in rest)


def _defaults(section: Any) -> dict[str, Any]:
    """Default of every key that has one."""
    given = {name: field for name, field in section.model_fields.items() if not field.is_required()}
    return {name: _plain(field.get_default(call_default_factory=True)) for name, field in given.items()}


def _plain(value: Any) -> Any:
    return value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else value


def _changed(
    section: Any, usual: Mapping[str, Any], table: Mapping[str, Any], prefix: str
) -> list[tuple[str, Any, Any]]:
    """(key, value, default) of what is not as usual. Tables in lists are compared with the defaults of their kind."""
    found: list[tuple[str, Any, Any]] = []
    for key, value in table.items():
        name = f"{prefix}{key}"
        field = None if section is None else section.model_fields.get(key)
        inner = None if field is None else section_of(field.annotation)
        if inner is not None and isinstance(value, dict):
            own = usual.get(key)
            found += _changed(inner, own if isinstance(own, dict) else _defaults(inner), value, f"{name}.")
        elif inner is not None and isinstance(value, list) and value:
            for place, item in enumerate(value):
                if isinstance(item, dict):
                    found += _changed(inner, _defaults(inner), item, f"{name}.{place}.")
        elif isinstance(value, dict) and value != usual.get(key):
            found += [(inside, item, NOT_GIVEN) for inside, item in _flat(value, name)]
        elif value != usual.get(key, NOT_GIVEN):
            found.append((name, value, usual.get(key, NOT_GIVEN)))
    return found
