"""From names to an objective: a preset, and what a recipe changes in it. Also: what a preset is, in words.

Owns: the registry of factors by kind, and every complaint about a name or an argument. Refuses: judging which factors
go together (combinations.py).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from temper.errors import UserError, did_you_mean
from temper.objectives.advantage.advantages import ADVANTAGES
from temper.objectives.advantage.critics import CRITICS
from temper.objectives.advantage.normalizers import NORMALIZERS
from temper.objectives.advantage.shaping import SHAPINGS
from temper.objectives.advantage.token_advantages import TOKEN_ADVANTAGES
from temper.objectives.factor import NEEDS, Factor
from temper.objectives.losses.pairs import PAIR_CONTROLLERS
from temper.objectives.losses.table import LOSSES
from temper.objectives.objective import DirectLoss, Loss, Objective
from temper.objectives.policy.constrained import CONSTRAINED_STEPS
from temper.objectives.policy.controllers import CONTROLLERS
from temper.objectives.policy.corrections import CORRECTIONS
from temper.objectives.policy.emphasis import EMPHASES
from temper.objectives.policy.gates import GATES
from temper.objectives.policy.proximals import PROXIMALS
from temper.objectives.policy.ratios import RATIOS
from temper.objectives.policy.reference_rules import REFERENCE_RULES
from temper.objectives.policy.regularizers import REGULARIZERS
from temper.objectives.policy.selections import SELECTIONS
from temper.objectives.policy.weighting import WEIGHTINGS
from temper.objectives.presets.table import PRESETS
from temper.types import Scalar

FactorSpec = str | Mapping[str, Scalar]
"""A registered name, or a table with its name and arguments. A table without a name changes the preset's own factor."""
AnyFactor = Factor[Any, Any]
Builder = Callable[..., AnyFactor]

REGISTRY: dict[str, Mapping[str, Builder]] = {
    "shaping": SHAPINGS,
    "advantage": {**ADVANTAGES, **TOKEN_ADVANTAGES},
    "normalizers": NORMALIZERS,
    "critic": CRITICS,
    "proximal": PROXIMALS,
    "ratio": RATIOS,
    "gate": GATES,
    "emphasis": EMPHASES,
    "corrections": {**CORRECTIONS, **SELECTIONS},
    "weighting": WEIGHTINGS,
    "regularizers": REGULARIZERS,
    "controllers": {**CONTROLLERS, **PAIR_CONTROLLERS},
    "reference": REFERENCE_RULES,
    "step": CONSTRAINED_STEPS,
    "loss": LOSSES,
}
"""Factors by kind, in the order in which they act."""

_ACCEPTED: dict[str, tuple[type, ...]] = {"float": (float, int), "int": (int,), "str": (str,)}
_LIST_OF_PRESETS = 'Run "temper presets" to list all.'


OPTIONAL_KINDS = ("critic", "reference", "step")
"""Kinds of which an objective may have none; "none" takes a preset's away."""
ABSENT = "-"
"""Text for a kind that an objective cannot have."""


def resolve(preset: str, overrides: Mapping[str, FactorSpec | Sequence[FactorSpec] | None] | None = None) -> Objective:
    """The preset with the given factors in place of its own; None leaves a factor as it is."""
    objective = preset_named(preset)
    wanted = {kind: spec for kind, spec in (overrides or {}).items() if spec is not None}
    for kind in wanted:
        if kind not in REGISTRY:
            raise UserError(f"objective.{kind} is unknown.{did_you_mean(kind, REGISTRY)} Kinds: {', '.join(REGISTRY)}.")
    if isinstance(objective, DirectLoss) and "loss" in wanted:
        objective = _with_loss(objective, _build("loss", _one("loss", wanted.pop("loss")), objective.loss))
    if strange := sorted(wanted.keys() - kinds_of(objective)):
        raise UserError(_why_strange(objective, strange[0]))
    return dataclasses.replace(objective, **{kind: _changed(objective, kind, spec) for kind, spec in wanted.items()})


def kinds_of(objective: Objective) -> frozenset[str]:
    """Kinds of factors that an objective has or may have."""
    fields = {field.name for field in dataclasses.fields(objective)} & REGISTRY.keys()
    return frozenset(fields if objective.weighting is not None else fields - {"weighting"})


def _with_loss(objective: DirectLoss, loss: AnyFactor) -> DirectLoss:
    assert isinstance(loss, Loss), f"{loss.name} is registered as a loss"
    weighting = (objective.weighting or WEIGHTINGS["token_mean"]()) if loss.is_weighed else None
    return dataclasses.replace(objective, loss=loss, weighting=weighting)


def _why_strange(objective: Objective, kind: str) -> str:
    if not isinstance(objective, DirectLoss):
        return (
            f"objective.{kind} would do nothing: {objective.name} is a policy gradient. Name a preset with a direct "
            f'loss, e.g. objective.preset = "dpo". {_LIST_OF_PRESETS}'
        )
    return (
        f"objective.{kind} would do nothing: {objective.name} has the direct loss {objective.loss.name}. "
        f"Leave it out here; a key that several stages share goes to the stages that use it"
    )


def _changed(objective: Objective, kind: str, wanted: FactorSpec | Sequence[FactorSpec]) -> Any:
    own = getattr(objective, kind)
    if kind in OPTIONAL_KINDS and wanted == "none":
        return None
    if not isinstance(own, tuple):
        return _build(kind, _one(kind, wanted), own)
    if isinstance(wanted, str | Mapping):
        raise UserError(f"objective.{kind} = {wanted!r} must be a list, e.g. [{wanted!r}].")
    owns = [*own, *[None] * len(wanted)]
    return tuple(_build(kind, spec, owns[place]) for place, spec in enumerate(wanted))


def preset_named(name: str) -> Objective:
    if name not in PRESETS:
        raise UserError(f'objective "{name}" is unknown.{did_you_mean(name, PRESETS)} {_LIST_OF_PRESETS}')
    return PRESETS[name]


def describe(name: str) -> str:
    """A preset for people: formula, factors with their defaults, needs, source."""
    objective = preset_named(name)
    reasons = objective.why_experimental
    lines = [f"{name}{'  (experimental)' if reasons else ''}", f"  {objective.formula}", ""]
    texts = {kind: text for kind, text in _factor_texts(objective).items() if getattr(objective, kind, None)}
    lines += [f"  {kind:<13} {text}" for kind, text in texts.items()]
    lines += [f"  {'experimental':<13} {reason}" for reason in reasons]
    if isinstance(objective, DirectLoss):
        lines.append(f"  {'reads':<13} {objective.loss.reads}")
    needs = [f"{need}: {NEEDS[need]}" for need in sorted(objective.needs)]
    lines += [f"  {'needs':<13} {text}" for text in needs or ["nothing beyond the sampled log-probabilities"]]
    lines += [
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
    texts = dict.fromkeys(REGISTRY, ABSENT)
    for kind in kinds_of(objective):
        own = getattr(objective, kind)
        texts[kind] = ", ".join(map(str, own)) or "none" if isinstance(own, tuple) else str(own or "none")
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
