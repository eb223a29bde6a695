"""Seconds of a step from a roofline: FLOPs over the matrix rate, bytes over the bandwidth, times what kernels reach.

Owns: the estimate and what dominates it. Refuses: rewards, environments and everything else that is no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from temper.planning.gpus import Gpu
from temper.planning.memory import kv_bytes_per_token
from temper.planning.workload import Workload
from temper.runs.flops import ModelSize, PassWork

TRAINING_REACH = 0.55
"""Share of the matrix rate that forward and backward passes reach; seen on an H200: 0.44 (1.5B) to 0.64 (7B)."""
ROLLOUT_REACH = 0.85
"""Share of bandwidth and matrix rate that a decode step reaches."""
LAYER_SECONDS = 50e-6
"""Of one layer of a decode step, however small: its kernels follow each other."""
UPDATE_TRAFFIC = {"float32": 320.0, "bfloat16": 160.0, "8bit": 130.0}
"""Bytes of bandwidth that an update takes for each parameter, by optim.states: 0.51 s in float32 for 7.6 billion
parameters on an H200, 0.042 s in 8 bits for 1.5 billion; bfloat16 by the bytes it moves more than those."""


@dataclass(frozen=True, slots=True)
class TimePlan:
    seconds: Mapping[str, float]
    """Of a step, by part."""
    reasons: Mapping[str, str]
    """What each part waits for."""

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def slowest(self) -> str:
        return max(self.seconds, key=lambda part: self.seconds[part])


def plan_seconds(work: Workload, gpu: Gpu) -> TimePlan:
    parts: dict[str, tuple[float, str]] = {}
    if work.rolls and work.engine != "elsewhere":
        parts |= {"prompts": _prefill(work, gpu), "decoding": _decode(work, gpu)}
    if work.frozen:
        parts["reference"] = _reference(work, gpu)
    if work.trains:
        parts |= {"forward and backward": _training(work, gpu), "update": _update(work, gpu)}
    if work.rolls and work.engine == "copied":
        moved = 3 * work.shape.parameters * work.itemsize
        parts["publishing"] = (moved / gpu.bandwidth, "bandwidth: weights are copied")
    return TimePlan({name: s for name, (s, _) in parts.items()}, {name: why for name, (_, why) in parts.items()})


def model_size(work: Workload) -> ModelSize:
    shape = work.shape
    is_whole = work.adapter is None
    return ModelSize(
        trained=shape.active_layers if is_whole else work.trained_parameters,
        frozen=0 if is_whole else shape.active_layers,
        head=0 if work.has_own_head else shape.embedding,
        is_head_trained=is_whole,
        attention_width=shape.query_width,
        windows=shape.windows,
    )


def _rate(work: Workload, gpu: Gpu) -> float:
    return gpu.flops("bfloat16" if work.itemsize == 2 else "float32")


def _step_rows(work: Workload) -> int:
    return work.rows_per_update * work.updates


def _pass(work: Workload, *, has_backward: bool) -> PassWork:
    """One group of rows: the prompt once where it is shared, and every completion."""
    prompts = 1 if work.shared_part(work.group_size) else work.group_size
    answers = np.arange(work.prompt_tokens, work.row_tokens)
    positions = np.concatenate([np.arange(work.prompt_tokens)] * prompts + [answers] * work.group_size)
    return PassWork(positions=positions, num_scored=work.group_size * work.completion_tokens, has_backward=has_backward)


def _groups(work: Workload) -> float:
    return _step_rows(work) / work.group_size


def _prefill(work: Workload, gpu: Gpu) -> tuple[float, str]:
    positions = np.arange(max(1, work.prompt_tokens))
    one = model_size(work).flops(PassWork(positions=positions, num_scored=1, has_backward=False))
    return _groups(work) * one / (_rate(work, gpu) * ROLLOUT_REACH), "matrix rate"


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds of one decode step, by what they grow with."""

    weights: float
    """Reading the weights, whoever is in the step."""
    kernels: float
    """Launching what the layers are made of."""
    row: float
    """Computing one sequence."""
    cached_token: float
    """Reading one token's keys and values."""


def decode_cost(work: Workload, gpu: Gpu) -> DecodeCost:
    shape = work.shape
    active, length = shape.active_layers + shape.embedding, _mid_length(work)
    bandwidth = gpu.bandwidth * ROLLOUT_REACH
    seen = sum(length if window is None else min(window, length) for window in shape.windows)
    return DecodeCost(
        weights=active * work.itemsize / bandwidth,
        kernels=shape.num_layers * LAYER_SECONDS,
        row=2 * active / (_rate(work, gpu) * ROLLOUT_REACH),
        cached_token=seen / length * kv_bytes_per_token(shape, work.itemsize) / shape.num_layers / bandwidth,
    )


def _mid_length(work: Workload) -> float:
    """Of a sequence in the middle of its completion."""
    return work.prompt_tokens + work.completion_tokens / 2


def _decode(work: Workload, gpu: Gpu) -> tuple[float, str]:
    """A step for every token of the longest completion, with as many rows as run and as the cache holds."""
    cost, length = decode_cost(work, gpu), _mid_length(work)
    held = max(1, int(work.choice.kv_tokens // length)) if work.choice.kv_tokens else work.max_running
    rows = min(work.max_running, _step_rows(work), held)
    turns = _step_rows(work) / rows
    by_reason = {
        "bandwidth: weights and keys are read": cost.weights + rows * length * cost.cached_token,
        "matrix rate": rows * cost.row,
        "launching kernels": cost.kernels,
    }
    seconds = sum(by_reason.values()) * work.completion_tokens * turns
    return seconds, max(by_reason, key=lambda why: by_reason[why])


def _reference(work: Workload, gpu: Gpu) -> tuple[float, str]:
    once = _groups(work) * model_size(work).flops(_pass(work, has_backward=False))
    computed = len(work.frozen) * once / (_rate(work, gpu) * TRAINING_REACH)
    moved = sum(shape.parameters for shape in work.frozen) * work.itemsize / gpu.link if work.offload_frozen else 0.0
    return computed + moved, "link to the host: models are brought" if moved > computed else "matrix rate"


def _training(work: Workload, gpu: Gpu) -> tuple[float, str]:
    size, groups = model_size(work), _groups(work)
    flops = groups * size.flops(_pass(work, has_backward=True))
    if work.choice.gradient_checkpointing:  # computed again, without the head
        flops += groups * 2 * (size.trained + size.frozen) * len(_pass(work, has_backward=False).positions)
    flops *= work.epochs
    if work.updates * work.epochs > 1:  # the proximal policy
        flops += groups * size.flops(_pass(work, has_backward=False))
    times = 2 if work.has_critic else 1
    return times * flops / (_rate(work, gpu) * TRAINING_REACH), "matrix rate"


def _update(work: Workload, gpu: Gpu) -> tuple[float, str]:
    trained = work.trained_parameters + (work.shape.parameters if work.has_critic else 0)
    computed = trained * UPDATE_TRAFFIC[work.choice.states] / gpu.bandwidth
    each = {"float32": 10.0, "bfloat16": 6.0, "8bit": 4.03}[work.choice.states]
    moved = trained * each / gpu.link if work.offload else 0.0
    why = "link to the host: states come and go" if moved > computed else "bandwidth: states are read and written"
    return work.updates * work.epochs * max(moved, computed), why
