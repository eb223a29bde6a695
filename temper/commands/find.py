"""Which checkpoint a path on the command line means.

Owns: the newest checkpoint of a run's policy. Refuses: reading it. Imports nothing heavy: a path that leads nowhere is
answered at once.
"""

from __future__ import annotations

from pathlib import Path

from temper.errors import UserError
from temper.folders.hub import find_checkpoint
from temper.trainer.checkpoint import latest_checkpoint


def find_model(path: Path) -> Path:
    """A checkpoint directory, or the newest checkpoint of a run's policy: a reward model answers nobody."""
    if not (path / "run.db").is_file():
        return find_checkpoint(str(path), key="checkpoint")
    stages = sorted((path / "checkpoints").glob("*-*"), key=lambda stage: int(stage.name.partition("-")[0]))
    policies = [stage for stage in stages if leaves_of(stage) != "scorer"]
    found = [latest for stage in policies if (latest := latest_checkpoint(stage))]
    if not found:
        has_other = len(policies) < len(stages)
        also = ". Name a checkpoint directory of its reward model, if that is meant" if has_other else ""
        when = "one is written every checkpoint.every steps, and after the last"
        raise UserError(f"{path} is a run without a checkpoint of a policy yet: {when}{also}")
    return found[-1]


def leaves_of(stage: Path) -> str:
    """What the stage with these checkpoints leaves to later ones."""
    from temper.stages.kinds import KINDS  # heavy, and a path that leads nowhere never comes here

    kind = KINDS.get(stage.name.partition("-")[2])
    return "policy" if kind is None else kind.leaves
