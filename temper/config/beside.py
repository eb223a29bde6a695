"""Files that lie beside a recipe: data, checkpoints, functions of the user's own.

Owns: which keys name files, and that a file beside the recipe is found first. Refuses: complaining about files that are
nowhere; whoever opens them does. A path that is not there beside the recipe is looked for in the working directory; one
that is in neither is named by its place beside the recipe where something there has nearly its name.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from temper.config.section import Section
from temper.config.sections import EnvConfig, RunConfig
from temper.config.sources import RewardConfig, StageSource
from temper.errors import nearest_path

Part = TypeVar("Part", bound=Section)


def look_beside(config: RunConfig, folder: Path) -> RunConfig:
    """The configuration with every file that lies in `folder` named by its place there."""
    evaluation = config.evaluation.model_copy(
        update={"reward": [_reward(part, folder) for part in config.evaluation.reward]}
    )
    return config.model_copy(
        update={
            "model": _with(config.model, folder, "path", "teacher").model_copy(
                update={"teachers": {name: find_file(path, folder) for name, path in config.model.teachers.items()}}
            ),
            "train": [_source(source, folder) for source in config.train],
            "heldout": [_source(source, folder) for source in config.heldout],
            "env": _env(config.env, folder),
            "reward": [_reward(part, folder) for part in config.reward],
            "evaluation": evaluation,
        }
    )


def _with(part: Part, folder: Path, *names: str) -> Part:
    return part.model_copy(update={name: find_file(getattr(part, name), folder) for name in names})


def _source(source: StageSource, folder: Path) -> StageSource:
    return _with(source, folder, "path", "records").model_copy(
        update={"generator": find_function(source.generator, folder)}
    )


def _env(env: EnvConfig, folder: Path) -> EnvConfig:
    options = dict(env.options)
    if isinstance(function := options.get("function"), str):
        options["function"] = find_function(function, folder)
    if isinstance(judge := options.get("judge"), str) and judge != "policy" and "://" not in judge:
        options["judge"] = find_file(judge, folder)
    if isinstance(hidden := options.get("hide"), list):
        options["hide"] = [find_file(str(path), folder) for path in hidden]
    return env.model_copy(update={"name": find_function(env.name, folder), "options": options})


def _reward(part: RewardConfig, folder: Path) -> RewardConfig:
    options = dict(part.options)
    if isinstance(path := options.get("path"), str):
        options["path"] = find_file(path, folder)
    return part.model_copy(update={"kind": find_function(part.kind, folder), "options": options})


def find_file(text: str, folder: Path) -> str:
    """Its path below `folder` where it is there, or was probably meant to be; else as it was given."""
    if not text or text.startswith("~") or Path(text).is_absolute():
        return text
    beside = folder / text
    is_misspelt = not Path(text).exists() and nearest_path(beside) is not None
    return str(beside) if beside.exists() or is_misspelt else text


def find_function(text: str, folder: Path) -> str:
    """Names "rewards:score" and "rewards.py:score" as "FOLDER/rewards.py:score" where that file is there, or was
    probably meant to be."""
    module, sign, name = text.rpartition(":")
    if not sign:
        return text
    file = module if module.endswith(".py") else f"{module}.py"
    return f"{found}:{name}" if (found := find_file(file, folder)) != file else text
