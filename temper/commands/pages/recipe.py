"""`temper recipe` and docs/recipe.md: every key of a recipe, from the sections that read it.

Owns: how keys are listed and explained. Nothing here is typed twice: names, types, bounds and defaults are the fields',
help is the text under them.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.table import Column, Table

from temper.config import RunConfig, known_keys, section_of
from temper.config.section import Factor
from temper.config.toml import to_toml_value
from temper.errors import UserError, did_you_mean

INTRO = """# The keys of a recipe

Written by `temper recipe --page docs`; do not edit. `temper recipe KEY` explains one in the terminal.

A recipe is a TOML file. Keys of a section stand in its table (`[optim]`, then `learning_rate = 1e-5`) or in one line
(`optim = { learning_rate = 1e-5 }`); sections with double brackets may be there several times. What stands outside of
`[[stage]]` tables holds for all stages; what stands in one overrides it there. On the command line
`--set optim.learning_rate=1e-5` changes a key of every stage, `--set stage.2.optim.learning_rate=1e-5` of the second
alone. A "name or table" is the name of a function, or a table with its name and arguments: `"clip"` or
`{name = "clip", high = 0.28}`.

The least that trains: a model, tasks and a reward.

```toml
model = { path = "models/smollm2-135m" }   # a folder, or a name on the hub: "HuggingFaceTB/SmolLM2-135M-Instruct"
train = [{ path = "train.jsonl" }]         # {"prompt": "2 + 2 =", "answer": "4"}, one object per line
reward = [{ kind = "math" }]               # stage = "rl" with the preset "grpo" unless said otherwise
```

**Rows** of an rl stage have a column `prompt` (a text, or a list of `{"role": ..., "content": ...}`) and a column
`answer` with the gold answer; `prompt_field` and `answer_field` name others, `answer_field = ""` says that there are
no gold answers, `answer_pattern = "#### (.+)"` takes a part of the column, as GSM8K needs. Further columns reach a
reward of your own that has parameters for them ([rewards](rewards.md#your-own)). Other shapes (conversations, pairs,
labelled steps) are recognised by their columns ([sft](sft.md), [preferences](preferences.md), [reward
models](reward_models.md)).

**Paths** of files are looked for beside the recipe, then in the working directory. What is in neither may be a name
on Hugging Face's hub: a model `"owner/name"`; rows `"owner/name"` (the split train of the only configuration, or of
the one called default or main), `"owner/name:split"` or `"owner/name:configuration/split"`. It is fetched once, into
the hub's own cache; where the hub cannot be reached, bring a folder: `hf download owner/name --local-dir
models/name`.
"""
TOP = "top level"
"""Of keys that stand in no table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a recipe."""

    name: str
    """With its section: "optim.learning_rate"."""
    type: str
    default: str
    help: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeSection:
    """One table of a recipe."""

    name: str
    """Empty: the top level."""
    is_list: bool
    help: str
    keys: tuple[Key, ...]

    @property
    def title(self) -> str:
        if not self.name:
            return TOP
        return f"[[{self.name}]]" if self.is_list else f"[{self.name}]"


def sections() -> list[RecipeSection]:
    """Every table, in the order of the code, the top level first."""
    return list(_walk(RunConfig, "", False, "What a stage is, and how long it takes."))


def _walk(section: type[BaseModel], name: str, is_list: bool, text: str) -> Iterator[RecipeSection]:
    fields = section.model_fields
    inner = {field: found for field, info in fields.items() if (found := section_of(info.annotation)) is not None}
    before = f"{name}." if name else ""
    keys = tuple(_key(before + field, info) for field, info in fields.items() if field not in inner)
    yield RecipeSection(name=name, is_list=is_list, help=text, keys=keys)
    for field, found in inner.items():
        info = fields[field]
        own = " ".join(filter(None, (found.__doc__, info.description)))
        yield from _walk(found, before + field, _is_list(info.annotation), " ".join(own.split()))


def _is_list(annotation: Any) -> bool:
    return typing.get_origin(annotation) is list


def _key(name: str, field: FieldInfo) -> Key:
    bounds = [f"{sign} {bound:g}" for part in field.metadata for sign, bound in _bounds(part)]
    default = "required" if field.is_required() else "unset" if field.default is None else to_toml_value(field.default)
    return Key(
        name=name,
        type=" ".join([_type(field.annotation), ", ".join(bounds)]).strip(),
        default=default,
        help=" ".join((field.description or "").split()),
    )


def _bounds(part: Any) -> Iterator[tuple[str, float]]:
    for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
        if (bound := getattr(part, name, None)) is not None:
            yield sign, bound


def _type(annotation: Any) -> str:
    """In words of TOML."""
    if annotation == Factor:
        return "name or table"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return ", ".join(f'"{value}"' for value in arguments)
    if origin is list:
        return f"list of {_type(arguments[0])}"
    if origin is tuple:
        return f"[{', '.join(map(_type, arguments))}]"
    if origin is dict:
        return "table"
    if origin in (types.UnionType, typing.Union):
        return _union([part for part in arguments if part is not type(None)])
    return {str: "text", int: "whole number", float: "number", bool: "true or false"}[annotation]


def _union(parts: list[Any]) -> str:
    if set(parts) == set(typing.get_args(Factor)):
        return "name or table"
    if set(parts) == {str, int, float, bool}:
        return "value"
    return " or ".join(map(_type, parts))


def list_keys() -> Table:
    """All keys, for the terminal."""
    table = Table(Column("key", no_wrap=True), "type", Column("default", overflow="fold"))
    for section in sections():
        table.add_section()
        table.add_row(section.title, "", "", style="bold")
        for key in section.keys:
            table.add_row(key.name, key.type, key.default)
    return table


def explain(name: str) -> str:
    """A key or a section, by its name with or without its section. UserError names the nearest one."""
    wanted = name.strip("[]")
    every = sections()
    if wanted == TOP or any(section.name == wanted for section in every):
        return "\n\n".join(_section_text(section) for section in every if _belongs(section.name, wanted))
    keys = [key for section in every for key in section.keys]
    if exact := [key for key in keys if key.name == wanted]:
        return _key_text(exact[0])
    if same := [key for key in keys if key.name.endswith(f".{wanted}")]:
        return "\n\n".join(map(_key_text, same))
    known = [*known_keys(), *(section.name for section in every if section.name)]
    raise UserError(f'a recipe has no key "{name}".{did_you_mean(wanted, known)} Run "temper recipe" to list all.')


def _belongs(section: str, wanted: str) -> bool:
    return section == ("" if wanted == TOP else wanted) or (bool(section) and section.startswith(f"{wanted}."))


def _section_text(section: RecipeSection) -> str:
    return "\n\n".join([f"{section.title}  {section.help}", *map(_key_text, section.keys)])


def _key_text(key: Key) -> str:
    return f"{key.name}: {key.type}; default {key.default}\n  {key.help}"


def write_page(folder: Path) -> Path:
    page = folder / "recipe.md"
    page.write_text(page_text())
    return page


def page_text() -> str:
    parts = [INTRO]
    for section in sections():
        title = section.title if section.name == "" else f"`{section.title}`"
        rows = [(f"`{key.name}`", key.type, f"`{key.default}`", key.help) for key in section.keys]
        lines = [("key", "type", "default", "meaning"), ("---",) * 4, *rows]
        table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        parts.append(f"## {title}\n\n{section.help}\n\n{table}\n")
    return "\n".join(parts)
