"""From names to an objective: a preset, and what a recipe changes in it. Also: what a preset is, in words.

Owns: the registry of factors by kind, and every complaint about a name, an argument or a combination.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from temper.errors import UserError, did_you_mean
from temper.objectives.advantages import ADVANTAGES
from temper.objectives.constrained import CONSTRAINED_STEPS
from temper.objectives.controllers import CONTROLLERS
from temper.objectives.corrections import CORRECTIONS
from temper.objectives.critics import CRITICS
from temper.objectives.emphasis import EMPHASES
from temper.objectives.factor import NEEDS, Factor
from temper.objectives.gates import GATES
from temper.objectives.lessons import LESSONS, stages_for
from temper.objectives.normalizers import NORMALIZERS
from temper.objectives.objective import Objective
from temper.objectives.pair_lessons import PAIR_CONTROLLERS
from temper.objectives.presets import PRESETS
from temper.objectives.proximals import PROXIMALS
from temper.objectives.ratios import RATIOS
from temper.objectives.reference_rules import REFERENCE_RULES
from temper.objectives.regularizers import REGULARIZERS
from temper.objectives.selections import SELECTIONS
from temper.objectives.shaping import SHAPINGS
from temper.objectives.token_advantages import TOKEN_ADVANTAGES
from temper.objectives.weighting import WEIGHTINGS
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
    "lesson": LESSONS,
}
"""Factors by kind, in the order in which they act."""

SAMPLER_WEIGHTS = frozenset(
    {
        "token_tis", "token_mis", "token_importance", "sequence_tis", "sequence_mis", "geometric_keep", "kl_keep",
        "veto", "m2po",
    }
)  # fmt: skip
"""Corrections that compare the proximal policy with the sampler."""

_ACCEPTED: dict[str, tuple[type, ...]] = {"float": (float, int), "int": (int,), "str": (str,)}
_LIST_OF_PRESETS = 'Run "temper presets" to list all.'


OPTIONAL_KINDS = ("critic", "reference", "step", "lesson")
"""Kinds of which an objective may have none; "none" takes a preset's away."""
IDLE_KINDS = frozenset(
    {
        "shaping", "advantage", "normalizers", "critic", "proximal", "ratio", "gate", "emphasis", "corrections",
        "regularizers",
    }
)  # fmt: skip
"""Kinds that do nothing beside a lesson."""
IDLE = "idle"


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
        if kind in OPTIONAL_KINDS and wanted == "none":
            changes[kind] = None
        elif not isinstance(own, tuple):
            changes[kind] = _build(kind, _one(kind, wanted), own)
        else:
            if isinstance(wanted, str | Mapping):
                raise UserError(f"objective.{kind} = {wanted!r} must be a list, e.g. [{wanted!r}].")
            owns = [*own, *[None] * len(wanted)]
            changes[kind] = tuple(_build(kind, spec, owns[place]) for place, spec in enumerate(wanted))
    changed = dataclasses.replace(objective, **changes)
    if changed.lesson is not None and (idle := sorted(changes.keys() & IDLE_KINDS)):
        raise UserError(
            f"objective.{idle[0]} would do nothing: {changed.name} has the lesson {changed.lesson.name}, a loss of its "
            f"own. Leave it out here; a key that several stages share goes to the stages that use it"
        )
    return changed


def preset_named(name: str) -> Objective:
    if name not in PRESETS:
        raise UserError(f'objective "{name}" is unknown.{did_you_mean(name, PRESETS)} {_LIST_OF_PRESETS}')
    return PRESETS[name]


def check_objective(objective: Objective, *, group_size: int) -> None:
    """Refuses combinations that would train something else than they say."""
    for check in _CHECKS:
        if (problem := check(objective, group_size)) is not None:
            raise UserError(problem)


def _check_group_size(objective: Objective, group_size: int) -> str | None:
    """Silently falling back to A = R would train something else."""
    if group_size >= objective.min_group:
        return None
    comparing = max(objective.factors, key=lambda factor: factor.min_group)
    return (
        f"group_size={group_size} is too small for objective {objective.name}: {comparing.name} compares a "
        f"completion with others of its group. Use group_size={objective.min_group} or more (8 is usual), or the "
        f'preset "reinforce", which needs no group.'
    )


def _check_bypass(objective: Objective, group_size: int) -> str | None:
    """A ratio against the sampler already holds the correction; corrections on top would count it twice."""
    twice = [correct.name for correct in objective.corrections if correct.name in SAMPLER_WEIGHTS]
    if objective.proximal.name != "behavior" or not twice:
        return None
    return (
        f'objective.proximal="behavior" takes the ratio against the sampler, which already contains the correction; '
        f'corrections {", ".join(twice)} would count it twice. Use proximal="trainer", or corrections = [].'
    )


def _check_top_tokens(objective: Objective, group_size: int) -> str | None:
    if not {"sampler_top_k", "policy_top_k"} <= objective.needs:
        return None
    return (
        f"objective {objective.name} asks for the likeliest tokens of both the sampler and the trainer, and a batch "
        f"carries one of them. Use factors of dppo_topk or of simko, not of both."
    )


def _check_critic(objective: Objective, group_size: int) -> str | None:
    if "values" not in objective.advantage.needs or objective.critic is not None:
        return None
    return f'objective.advantage {objective.advantage.name} needs a critic. Add objective.critic = "gae_targets".'


def _check_reference(objective: Objective, group_size: int) -> str | None:
    readers = [factor for factor in objective.factors if factor is not objective.reference]
    if objective.reference is None or any("reference" in factor.needs for factor in readers):
        return None
    return (
        f"objective.reference = {objective.reference} moves a reference model, but nothing compares with one. Add "
        f'objective.regularizers = [{{name = "kl", coefficient = 0.001}}], or leave objective.reference out.'
    )


def _check_scales(objective: Objective, group_size: int) -> str | None:
    """A controller of a factor that is not there would run and change nothing."""
    scaled = {name for controller in objective.controllers for name in controller({}, {}) if "." not in name}
    if not (missing := scaled - {factor.name for factor in objective.factors}):
        return None
    return f"objective.controllers steer {', '.join(sorted(missing))}, which objective {objective.name} does not have."


def _check_shaping(objective: Objective, group_size: int) -> str | None:
    """Terms first, then the rule for cut answers, then the clip, then the KL: in another order they undo each other."""
    names, order = [shape.name for shape in objective.shaping], list(SHAPINGS)
    if names != sorted(names, key=order.index):
        return f"objective.shaping = {names} is out of order. Use {sorted(names, key=order.index)}."
    if names and objective.advantage.name == "per_reward":
        return (
            f"objective.advantage per_reward compares the parts of the reward, which objective.shaping = {names} does "
            f"not reach. Use shaping = [], and put such a term into a [[reward]] of its own."
        )
    return None


def _check_rescaling(objective: Objective, group_size: int) -> str | None:
    if not {"batch_normalize", "kept_denominator"} <= {correct.name for correct in objective.corrections}:
        return None
    return "kept_denominator and batch_normalize both make up for dropped tokens, twice together. Use one of them."


def _check_clip_cov(objective: Objective, group_size: int) -> str | None:
    reads = (objective.ratio.needs | objective.gate.needs) & {"sampler_top_k", "policy_top_k"}
    if not reads or all(correct.name != "clip_cov" for correct in objective.corrections):
        return None
    return 'clip_cov cannot ask a gate that reads the likeliest tokens. Use ratio = "token" and gate = "clip".'


_CHECKS = (
    _check_group_size,
    _check_bypass,
    _check_top_tokens,
    _check_critic,
    _check_reference,
    _check_scales,
    _check_shaping,
    _check_rescaling,
    _check_clip_cov,
)


def describe(name: str) -> str:
    """A preset for people: formula, factors with their defaults, needs, source."""
    objective = preset_named(name)
    reasons = objective.why_experimental
    lines = [f"{name}{'  (experimental)' if reasons else ''}", f"  {objective.formula}", ""]
    texts = {kind: text for kind, text in _factor_texts(objective).items() if getattr(objective, kind)}
    lines += [f"  {kind:<13} {text}" for kind, text in texts.items() if text != IDLE]
    lines += [f"  {'experimental':<13} {reason}" for reason in reasons]
    if objective.lesson is not None:
        lines.append(f"  {'stage':<13} {', '.join(stages_for(objective.lesson.name))}")
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
    texts = {}
    for kind in REGISTRY:
        own = getattr(objective, kind)
        if objective.lesson is not None and kind in IDLE_KINDS:
            texts[kind] = IDLE
            continue
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
