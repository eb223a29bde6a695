"""What is said about a mistake in a recipe: the place, the value, what is allowed, what was meant.

Owns: these sentences, and what keys are called elsewhere. Refuses: the keys themselves (sections.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from temper.config.sections import RunConfig
from temper.errors import did_you_mean

REPLACED = {
    "objective.lesson": "is called objective.loss now",
    "optim.adam": "is three keys now: optim.beta1, optim.beta2 and optim.epsilon",
    "engine.cuda_graphs": "is called engine.graphs now",
    "model.lora.dropout": "does not exist: the sampler has no dropout, so it would draw from another policy than the "
    "trainer's. Weight decay or a smaller rank also restrain an adapter",
}
"""Keys that recipes once had, or that those of others have, and what to write."""
ELSEWHERE = {
    "lr": "optim.learning_rate",
    "lr_scheduler_type": "optim.schedule",
    "lr_scheduler": "optim.schedule",
    "scheduler": "optim.schedule",
    "warmup": "optim.warmup_steps",
    "warmup_ratio": "optim.warmup_steps",
    "grad_clip": "optim.max_grad_norm",
    "max_steps": "steps",
    "num_steps": "steps",
    "total_training_steps": "steps",
    "num_train_epochs": "steps",
    "num_generations": "rollout.group_size",
    "n_samples": "rollout.group_size",
    "batch_size": "rollout.groups_per_step",
    "train_batch_size": "rollout.groups_per_step",
    "per_device_train_batch_size": "rollout.groups_per_step",
    "gradient_accumulation_steps": "trainer.tokens_per_microbatch",
    "micro_batch_size": "trainer.tokens_per_microbatch",
    "ppo_epochs": "trainer.epochs",
    "num_iterations": "trainer.epochs",
    "max_completion_length": "sampling.max_new_tokens",
    "max_response_length": "sampling.max_new_tokens",
    "max_tokens": "sampling.max_new_tokens",
    "max_seq_length": "trainer.max_length",
    "kl_coef": "objective.regularizers",
    "beta": "objective.regularizers",
    "clip_range": "objective.gate",
    "loss_type": "objective.preset",
    "algorithm": "objective.preset",
    "algo": "objective.preset",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "dataset": "train",
    "data": "train",
    "train_dataset": "train",
    "eval_dataset": "heldout",
    "reward_funcs": "reward",
    "reward_fn": "reward",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "eval_steps": "evaluation.every",
    "report_to": "mirrors",
    "wandb": "mirrors",
    "logger": "mirrors",
    "use_vllm": "engine.kind",
    "peft_config": "model.lora",
}
"""Last parts of keys as other frameworks write them, and the key here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeText:
    """What a recipe was read from."""

    where: str
    text: str
    overrides: Sequence[str]


def explain_mistakes(problems: Iterable[ErrorDetails], source: RecipeText, stage: str = "") -> str:
    """One line for each. `stage` names the one that is meant where there are several."""
    return "\n".join(_explain(problem, source, stage) for problem in problems)


def _explain(problem: ErrorDetails, source: RecipeText, stage: str) -> str:
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location)
    place = _place(location, problem["input"], source, stage)
    if problem["type"] == "extra_forbidden":
        return f'{place}: key "{key}" {_what_was_meant(location)}'
    message = str(problem["msg"]).removeprefix("Value error, ")
    given = "" if problem["type"] in ("value_error", "missing") else f" (got {problem['input']!r})"
    near = did_you_mean(str(problem["input"]), _allowed(problem)) if problem["type"] == "literal_error" else ""
    return f"{place}: {f'{key}: ' if key else ''}{message}{given}.{near}"


def _what_was_meant(location: Sequence[str]) -> str:
    key, name = ".".join(location), location[-1]
    if key in REPLACED:
        return f"{REPLACED[key]}."
    allowed = sorted(_fields_at(location[:-1]))
    if name in ELSEWHERE:
        meant = f" It is called {ELSEWHERE[name]} here."
    elif near := did_you_mean(name, allowed):
        meant = near
    else:
        same = [known for known in known_keys() if known.endswith(f".{name}")]
        meant = f" There is {', '.join(same[:4])}." if same else ""
    section = ".".join(part for part in location[:-1] if not part.isdigit())
    advice = f' "temper recipe {section}" explains them.' if section else ' "temper recipe" lists all.'
    return f"is unknown.{meant} Allowed here: {', '.join(allowed)}.{advice}"


def _allowed(problem: ErrorDetails) -> list[str]:
    """Of a key with a few possible values: which."""
    return re.findall(r"'([^']*)'", str(problem.get("ctx", {}).get("expected", "")))


def _place(location: Sequence[str], value: object, source: RecipeText, stage: str) -> str:
    """Where a mistake stands: an argument of --set, a line of the file, a stage."""
    key = ".".join(location)
    for override in source.overrides:
        name = override.partition("=")[0].strip()
        if key and re.sub(r"^stage\.\d+\.", "", name) == key:
            return f"--set {override}"
    names = ["kind", "stage"] if key == "stage" else location[-1:]
    line = next((line for name in names if (line := _line_of(name, value, source.text))), None)
    if line:
        return f"{source.where}, line {line}"
    return f"{source.where}, {stage}" if stage else source.where


def _line_of(key: str, value: object, text: str) -> int | None:
    """The line on which a key is given that value, or the only one on which it stands at all."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("#"):
            continue
        if line.strip().strip("[]").split(".")[-1] == key:
            found.append((number, ""))
        found += [(number, rest) for rest in re.findall(rf"(?:^|[\s{{,.]){re.escape(key)}\s*=\s*(.*)", line)]
    fitting = [number for number, rest in found if not isinstance(value, dict | list) and str(value) in rest]
    numbers = fitting or [number for number, _ in found]
    return numbers[0] if len(set(numbers)) == 1 or fitting else None


def known_keys(section: type[BaseModel] = RunConfig, before: str = "") -> Iterator[str]:
    """Names of all keys, with their sections: "steps", "optim.learning_rate"."""
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is None:
            yield before + name
        else:
            yield from known_keys(inner, f"{before}{name}.")


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
