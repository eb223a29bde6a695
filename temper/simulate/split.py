"""How GPUs are shared out between samplers and trainers.

Owns: the split that keeps the slower side fastest, by the speeds of both. Refuses: simulating it (run.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from temper.errors import UserError
from temper.simulate.speeds import Speeds, TrainingWork, training_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    samplers: int
    trainers: int
    is_shared: bool
    """Whether all GPUs draw and then all train."""
    parts: bool = False
    """Whether each trainer holds a part of weights and states, in place of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """What a step draws and trains, in the mean."""

    rows: int
    prompt_tokens: float
    answer_tokens: float
    max_running: int
    updates: int = 1


def require_samplers(trainers: int, gpus: int) -> None:
    if not 0 <= trainers < max(2, gpus):
        raise UserError(f"--trainers {trainers} of --gpus {gpus}: at least one must be left to draw. Use fewer")


def split_gpus(speeds: Speeds, size: StepSize, *, gpus: int, max_staleness: int, trainers: int = 0) -> Split:
    """By speeds alone, where nothing is known of memory (a planned model has a layout: planning/layout.py). Synchronous
    steps and single GPUs are shared; otherwise each side has its own. `trainers` 0: as many as make the slower of the
    two sides fastest."""
    require_samplers(trainers, gpus)
    if max_staleness == 0 or gpus == 1:
        return Split(samplers=gpus, trainers=gpus, is_shared=True)
    if not trainers:
        trainers = min(range(1, gpus), key=lambda count: _slower_side(speeds, size, gpus - count, count, max_staleness))
    return Split(samplers=gpus - trainers, trainers=trainers, is_shared=False)


def _slower_side(speeds: Speeds, size: StepSize, samplers: int, trainers: int, max_staleness: int) -> float:
    """Seconds of a step, as if each side never waited for the other."""
    tokens = round(size.rows * (size.prompt_tokens + size.answer_tokens))
    work = TrainingWork(tokens=tokens, rows=size.rows, updates=size.updates)
    training = training_seconds(speeds, work, trainers) + speeds.publish
    running = min(size.max_running, -(-(max_staleness + 1) * size.rows // samplers))
    held = running * (size.prompt_tokens + size.answer_tokens / 2)
    drawing = size.rows * size.answer_tokens / (samplers * running) * speeds.decode_seconds(running, held)
    # Nothing is faster than its longest answer, and no answer faster than decode steps with few in them.
    return max(training, drawing)
