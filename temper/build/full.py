"""What is said when a GPU has no room while a stage is loaded or runs.

Owns: the message, and the key to change. Refuses: planning (memory.py), and going on: a run is resumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from temper.build.memory import describe_peak, workload_of
from temper.config import RunConfig
from temper.config.memory import KEYS, MemoryChoice, settled_choice
from temper.errors import BackendError, OutOfMemory
from temper.objectives import Objective
from temper.planning.gpus import GIB
from temper.planning.memory import plan_memory
from temper.stages.reading.data import StageData

LEAST_MICROBATCH = 1024
"""A smaller one is no advice: single rows are longer."""
FULL_KEYS = {
    "loading": ("kv_tokens", "states"),
    "rollout": ("kv_tokens", "tokens_per_microbatch"),
    "forward_backward": ("tokens_per_microbatch", "gradient_checkpointing", "states"),
    "optimizer": ("states", "kv_tokens"),
}
"""Keys that help when a phase of a step finds no room, the cheapest first; other phases: as the second."""


@contextmanager
def explain_out_of_memory(
    config: RunConfig, objective: Objective, data: StageData, origin: Path, *, phase: str = "a pass outside of the step"
) -> Iterator[None]:
    """Out of memory inside becomes a BackendError that says in which phase, what was planned, and what to change.

    `phase`: what is done inside, where the error does not say it. `origin`: directory of the stage's model.
    """
    try:
        yield
    except Exception as error:
        if (full := _find_full(error, phase)) is None:
            raise
        raise BackendError(_explain_full(full, config, objective, data, origin)) from error


def _find_full(error: BaseException, phase: str) -> OutOfMemory | None:
    """That a GPU was full, if that is why this was raised."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OutOfMemory):
            return cause
        if isinstance(cause, torch.OutOfMemoryError):
            return OutOfMemory(phase, cause)
        cause = cause.__cause__
    return None


def _explain_full(error: OutOfMemory, config: RunConfig, objective: Objective, data: StageData, origin: Path) -> str:
    choice, planned = settled_choice(config), plan_memory(workload_of(config, objective, data, origin))
    fields = FULL_KEYS.get(error.phase, FULL_KEYS["forward_backward"])
    change = next((_less(field, choice) for field in fields if _less(field, choice)), "")
    change = change or "Use a smaller model, shorter rows or a larger GPU"
    return (
        f"{error}. Planned were {planned.peak_bytes / GIB:.1f} GiB, {describe_peak(planned)}; what other programs hold "
        f"on the GPU comes on top. What was saved is whole. {change}; then go on with --resume"
    )


def _less(field: str, choice: MemoryChoice) -> str:
    """A change of this key that takes less memory; "": there is none."""
    key = KEYS[field]
    if field == "tokens_per_microbatch" and choice.tokens_per_microbatch > LEAST_MICROBATCH:
        return f"Set {key} = {max(LEAST_MICROBATCH, choice.tokens_per_microbatch // 2)}"
    if field == "gradient_checkpointing" and not choice.gradient_checkpointing:
        return f"Set {key} = true"
    if field == "kv_tokens" and choice.kv_tokens:
        return f"Set {key} = {choice.kv_tokens // 2}"
    if field == "states":
        return "Set optim.offload = true"  # a run is resumed with the states it was started with
    return ""
