"""From names to an objective: a preset, and what a recipe changes in it. Also: what a preset is, in words.

Owns: the registry of factors by kind, and every complaint about a name, an argument or a combination.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from temper.errors import UserError, did_you_mean
from temper.objectives.advantages import ADVANTAGES
from temper.objectives.corrections import CORRECTIONS
from temper.objectives.factor import Factor
from temper.objectives.gates import GATES
from temper.objectives.objective import Objective
from temper.objectives.presets import PRESETS
from temper.objectives.ratios import RATIOS
from temper.objectives.regularizers import REGULARIZERS
from temper.objectives.shaping import SHAPINGS
from temper.objectives.weighting import WEIGHTINGS
from temper.types import Scalar

FactorSpec = str | Mapping[str, Scalar]
"""A registered name, or a table with its name and arguments. A table without a name changes the preset's own factor."""
AnyFactor = Factor[Any, Any]
Builder = Callable[..., AnyFactor]

REGISTRY: dict[str, Mapping[str, Builder]] = {
    "shaping": SHAPINGS,
    "advantage": ADVANTAGES,
    "ratio": RATIOS,
    "gate": GATES,
    "corrections": CORRECTIONS,
    "weighting": WEIGHTINGS,
    "regularizers": REGULARIZERS,
}
"""Factors by kind, in the order in which they act."""

_ACCEPTED: dict[str, tuple[type, ...]] = {"float": (float, int), "int": (int,), "str": (str,)}
_LIST_OF_PRESETS = 'Run "temper presets" to list all.'


def resolve(preset: str, overrides: Mapping[str, FactorSpec | Sequence[FactorSpec] | None] | None = None) -> Objective:
    """The preset with the given factors in place of its own; None leaves a factor as it is."""
    objective = preset_named(preset)
    changes: dict[str, Any] = {}
    for kind, wanted in (overrides or {}).items():
        if kind not in REGISTRY:
            raise UserError(f"objective.{kind} is unknown.{did_you_mean(kind, REGISTRY)} Kinds: {', '.join(REGISTRY)}.")
        if wanted is None:
            continue
        own = getattr(objective, kind)
        if not isinstance(own, tuple):
            changes[kind] = _build(kind, _one(kind, wanted), own)
        else:
            if isinstance(wanted, str | Mapping):
                raise UserError(f"objective.{kind} = {wanted!r} must be a list, e.g. [{wanted!r}].")
            owns = [*own, *[None] * len(wanted)]
            changes[kind] = tuple(_build(kind, spec, owns[place]) for place, spec in enumerate(wanted))
    return dataclasses.replace(objective, **changes)


def preset_named(name: str) -> Objective:
    if name not in PRESETS:
        raise UserError(f'objective "{name}" is unknown.{did_you_mean(name, PRESETS)} {_LIST_OF_PRESETS}')
    return PRESETS[name]


def check_group_size(objective: Objective, group_size: int) -> None:
    """Refuses a group too small for the baseline; silently falling back to A = R would train something else."""
    if group_size < objective.min_group:
        raise UserError(
            f"group_size={group_size} is too small for objective {objective.name}: {objective.advantage.name} compares "
            f"a completion with others of its group. Use group_size={objective.min_group} or more (8 is usual), or "
            f'the preset "reinforce", which needs no group.'
        )


def check_proximal(objective: Objective, proximal: Literal["trainer", "behavior"]) -> None:
    """Refuses sampler corrections when the ratio is already taken against the sampler: they would count twice."""
    if proximal == "behavior" and objective.corrections:
        names = ", ".join(correction.name for correction in objective.corrections)
        raise UserError(
            f'objective.proximal="behavior" takes the ratio against the sampler, which already contains the '
            f'correction; corrections {names} would count it twice. Use proximal="trainer", or corrections = [].'
        )


def describe(name: str) -> str:
    """A preset for people: formula, factors with their defaults, needs, source."""
    objective = preset_named(name)
    lines = [f"{name}{'  (experimental)' if objective.experimental else ''}", f"  {objective.formula}", ""]
    lines += [f"  {kind:<13} {text}" for kind, text in _factor_texts(objective).items()]
    lines += [
        f"  {'needs':<13} {', '.join(sorted(objective.needs)) or 'nothing beyond the sampled log-probabilities'}",
        f"  {'wants':<13} {', '.join(sorted(objective.wants)) or 'nothing'}",
        f"  {'group size':<13} {objective.min_group} or more",
        f"  {'source':<13} {objective.source}",
    ]
    return "\n".join([*lines, "", f"  {objective.note}"])


def compare(first: str, second: str) -> list[tuple[str, str, str]]:
    """(kind, of the first, of the second) for every factor in which two presets differ."""
    left, right = _texts(preset_named(first)), _texts(preset_named(second))
    return [(kind, left[kind], right[kind]) for kind in left if left[kind] != right[kind]]


def _texts(objective: Objective) -> dict[str, str]:
    return _factor_texts(objective) | {"wants": ", ".join(sorted(objective.wants)) or "nothing"}


def _factor_texts(objective: Objective) -> dict[str, str]:
    texts = {}
    for kind in REGISTRY:
        own = getattr(objective, kind)
        texts[kind] = ", ".join(map(str, own)) or "none" if isinstance(own, tuple) else str(own)
    return texts


def _one(kind: str, wanted: FactorSpec | Sequence[FactorSpec]) -> FactorSpec:
    if isinstance(wanted, str | Mapping):
        return wanted
    raise UserError(f"objective.{kind} takes one factor, not a list: {list(wanted)!r}.")


def _build(kind: str, spec: FactorSpec, own: AnyFactor | None) -> AnyFactor:
    """One factor from its name or table; `own` is what a table without a name changes."""
    table = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = table.pop("name", None)
    if name is None:
        if own is None:
            raise UserError(f"objective.{kind}: {spec!r} lacks a name. Known: {', '.join(REGISTRY[kind])}.")
        name, table = own.name, {key: value for key, value in own.arguments if value is not None} | table
    if name not in REGISTRY[kind]:
        known = REGISTRY[kind]
        raise UserError(
            f'objective.{kind} "{name}" is unknown.{did_you_mean(str(name), known)} '
            f"Known: {', '.join(known)}. {_LIST_OF_PRESETS}"
        )
    build = REGISTRY[kind][str(name)]
    _check_arguments(f"objective.{kind} {name}", build, table)
    return build(**table)


def _check_arguments(place: str, build: Builder, table: Mapping[str, Scalar]) -> None:
    parameters = inspect.signature(build).parameters
    for key, value in table.items():
        if key not in parameters:
            raise UserError(
                f'{place}: argument "{key}" is unknown.{did_you_mean(key, parameters)} '
                f"Allowed: {', '.join(parameters) or 'none'}. {_LIST_OF_PRESETS}"
            )
        wanted = str(parameters[key].annotation).split(" |")[0]
        if isinstance(value, bool) or not isinstance(value, _ACCEPTED[wanted]):
            raise UserError(f"{place}: {key}={value!r} must be of type {wanted}.")
    missing = [key for key, p in parameters.items() if p.default is inspect.Parameter.empty and key not in table]
    if missing:
        raise UserError(f"{place}: argument {missing[0]} is missing, e.g. {{name = ..., {missing[0]} = 0.01}}.")
