"""Paths that name an earlier stage of the same recipe: "stage:rl", "stage:reward_model", "stage:first".

Owns: where such a path may stand, and putting something in its place. Refuses: which stage leaves what (stages/).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from temper.config.sections import RunConfig
from temper.config.sources import RewardConfig, StageSource

FIRST = "first"
"""The model that the run started from."""
DATA_KEYS = ("train.path", "heldout.path")
_REFERENCE = re.compile(r"stage:(\w*)")


@dataclass(frozen=True, slots=True)
class Reference:
    """One such path."""

    key: str
    """Where it stands, e.g. "model.teacher"."""
    kind: str


def references(config: RunConfig) -> list[Reference]:
    """Earlier stages that this one reads from."""
    found: list[Reference] = []

    def note(reference: Reference) -> str:
        found.append(reference)
        return ""

    _replaced(config, note)
    return found


def refer(config: RunConfig, outputs: Mapping[str, Path]) -> RunConfig:
    """The configuration with every such path replaced by what the last earlier stage of that kind has written."""
    return _replaced(config, lambda reference: str(outputs[reference.kind]))


def _replaced(config: RunConfig, path_of: Callable[[Reference], str]) -> RunConfig:
    def replaced(key: str, text: str) -> str:
        return _REFERENCE.sub(lambda match: path_of(Reference(key, match.group(1))), text)

    def source(key: str, given: StageSource) -> StageSource:
        return given.model_copy(update={"path": replaced(f"{key}.path", given.path)})

    def reward(key: str, part: RewardConfig) -> RewardConfig:
        path = part.options.get("path")
        if not isinstance(path, str):
            return part
        return part.model_copy(update={"options": {**part.options, "path": replaced(f"{key}.options.path", path)}})

    model, evaluation = config.model, config.evaluation
    paths = {name: replaced(f"model.{name}", getattr(model, name)) for name in ("path", "teacher")}
    teachers = {name: replaced(f"model.teachers.{name}", path) for name, path in model.teachers.items()}
    judges = [reward("evaluation.reward", part) for part in evaluation.reward]
    return config.model_copy(
        update={
            "model": model.model_copy(update={**paths, "teachers": teachers}),
            "train": [source("train", given) for given in config.train],
            "heldout": [source("heldout", given) for given in config.heldout],
            "reward": [reward("reward", part) for part in config.reward],
            "evaluation": evaluation.model_copy(update={"reward": judges}),
        }
    )
