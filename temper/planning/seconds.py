"""Seconds of a step from a roofline: FLOPs over the matrix rate, bytes over the bandwidth, times what kernels reach.

Owns: the estimate and what dominates it. Refuses: rewards, environments and everything else that is no model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from temper.planning.exchange import exchange_seconds, layer_sums_seconds, publishing_seconds
from temper.planning.gpus import Gpu
from temper.planning.memory import FOUR_BIT_BYTES, kv_bytes_per_token, state_bytes
from temper.planning.workload import Workload
from temper.runs.flops import ModelSize, PassWork

TRAINING_REACH = 0.55
"""Share of the matrix rate that forward and backward passes reach; seen on an H200: 0.44 (1.5B) to 0.64 (7B)."""
EXPERTS_REACH = 0.22
"""The same of models with experts, whose products are many and small; seen on an H200 with four layers of
Qwen3-30B-A3B's shape (as benchmarks/scale.py --experts): 0.20 with rows of 2,048 tokens to 0.25 with 8,192."""
ROLLOUT_REACH = 0.85
"""Share of bandwidth and matrix rate that a decode step reaches."""
LAYER_SECONDS = 50e-6
"""Of one layer of a decode step, however small: its kernels follow each other."""
FOUR_BIT_SECONDS = 84e-6
"""Of such a layer whose matrices are in 4 bits, beside those: for each of seven one kernel that makes the weight, two
that round factors, two narrow products and a sum, 42 at 2 microseconds each."""
UPDATE_TRAFFIC = {"float32": 93.0, "bfloat16": 160.0, "8bit": 130.0}
"""Bytes of bandwidth that an update takes for each parameter, by optim.states. 8 bits: 0.042 s for 1.5 billion
parameters on an H200; bfloat16 by the bytes it moves more than those. float32 by count, not measured: norm 4, clipped
8, masters joined 8, torch's kernel 28, measured 12, split 10, at three quarters of the bandwidth."""


SUMS = "links between GPUs: layers are added up"


DRAWING, PUBLISHING = ("prompts", "decoding"), "publishing"
"""Parts of a step that are the samplers', and the one that both sides wait for; all others are the trainers'."""


@dataclass(frozen=True, slots=True)
class TimePlan:
    seconds: Mapping[str, float]
    """Of a step, by part."""
    reasons: Mapping[str, str]
    """What each part waits for."""
    overlaps: bool = False
    """Whether one step is drawn while another is trained."""

    @property
    def drawing(self) -> float:
        """Seconds of the samplers' GPUs."""
        return sum(seconds for part, seconds in self.seconds.items() if part in DRAWING)

    @property
    def training(self) -> float:
        """Seconds of the trainers' GPUs."""
        return sum(seconds for part, seconds in self.seconds.items() if part not in (*DRAWING, PUBLISHING))

    @property
    def total(self) -> float:
        """As if no side ever waited for the other's odd steps; new weights hold up both."""
        sides = (self.drawing, self.training)
        return (max(sides) if self.overlaps else sum(sides)) + self.seconds.get(PUBLISHING, 0.0)

    @property
    def slowest(self) -> str:
        """The largest part of those that the step waits for."""
        hidden = {part for part in self.seconds if (part in DRAWING) == (self.drawing < self.training)}
        seen = [part for part in self.seconds if not (self.overlaps and part in hidden and part != PUBLISHING)]
        return max(seen, key=lambda part: self.seconds[part])


def plan_seconds(work: Workload, gpu: Gpu) -> TimePlan:
    parts: dict[str, tuple[float, str]] = {}
    if work.rolls and work.engine != "elsewhere":
        parts |= {"prompts": _prefill(work, gpu), "decoding": _decode(work, gpu)}
    if work.frozen:
        parts["reference"] = _reference(work, gpu)
    if work.trains:
        parts |= {"forward and backward": _training(work, gpu), "update": _update(work, gpu)}
    if work.trains and work.trainers > 1:
        parts["exchange"] = _exchange(work, gpu, parts["forward and backward"][0])
    if work.rolls and work.engine in ("copied", "apart"):
        why = "bandwidth: weights are copied" if work.engine == "copied" else "links between GPUs: weights are sent"
        parts[PUBLISHING] = (publishing_seconds(work, gpu), why)
    seconds = {name: s for name, (s, _) in parts.items()}
    return TimePlan(seconds, {name: why for name, (_, why) in parts.items()}, work.overlaps)


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
    return gpu.flops(str(work.dtype))


def _reach(work: Workload) -> float:
    return EXPERTS_REACH if work.shape.num_experts else TRAINING_REACH


def _step_rows(work: Workload) -> int:
    return work.rows_per_update * work.updates


def _trained_share(work: Workload) -> float:
    """Of a batch, on the GPU that has most of it."""
    return work.trainer_rows / work.rows_per_update / work.context


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
    prompts = _groups(work) / work.drawing_gpus
    computed = prompts * one / (_rate(work, gpu) * ROLLOUT_REACH) / work.engine_gpus
    passes = math.ceil(prompts * len(positions) / work.pass_tokens)
    sums = passes * layer_sums_seconds(work, work.pass_tokens, gpu)
    return computed + sums, "matrix rate" if computed >= sums else SUMS


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds of one decode step, by what they grow with."""

    weights: float
    """Reading the weights, whoever is in the step: of experts those that any sequence of a usual step needs."""
    kernels: float
    """Launching what the layers are made of."""
    sums: float
    """Adding up over GPUs that share matrices out, for the sequences of a usual step."""
    row: float
    """Computing one sequence."""
    cached_token: float
    """Reading one token's keys and values."""


def decode_cost(work: Workload, gpu: Gpu) -> DecodeCost:
    shape = work.shape
    active, length = shape.active_layers + shape.embedding, _mid_length(work)
    bandwidth = gpu.bandwidth * ROLLOUT_REACH
    seen = sum(length if window is None else min(window, length) for window in shape.windows)
    rows, each = _running_rows(work), 1 / work.engine_gpus
    moved = shape.read_layers(rows) * _matrix_traffic(work) + shape.embedding * work.itemsize
    layer_seconds = LAYER_SECONDS + (FOUR_BIT_SECONDS if work.has_four_bit_base else 0.0)
    return DecodeCost(
        weights=each * moved / bandwidth,
        kernels=shape.num_layers * layer_seconds,
        sums=layer_sums_seconds(work, rows, gpu),
        row=each * 2 * active / (_rate(work, gpu) * ROLLOUT_REACH),
        cached_token=each * seen / length * kv_bytes_per_token(shape, work.itemsize) / shape.num_layers / bandwidth,
    )


def _matrix_traffic(work: Workload) -> float:
    """Bytes for each parameter of a layer in a decode step. Codes of 4 bits are read, the weight is written in full and
    read by its product. That products of float8 are faster, too, is not counted: states are quantised for them."""
    if work.has_four_bit_base:
        return FOUR_BIT_BYTES + 2 * work.itemsize
    return 1.0 if work.has_float8_sampler else float(work.itemsize)


def _mid_length(work: Workload) -> float:
    """Of a sequence in the middle of its completion."""
    return work.prompt_tokens + work.completion_tokens / 2


def _running_rows(work: Workload) -> int:
    """Sequences of one decode step: as many as run, as the cache holds, and as are there for this GPU. Where one step
    is drawn while another is trained there are those of several steps. Of answers whose lengths are known, room is kept
    for all they will draw, as in a simulation."""
    held = work.max_running
    if work.choice.kv_tokens:
        each = work.row_tokens if work.longest_tokens else _mid_length(work)
        held = max(1, int(work.choice.kv_tokens // each))
    here = -(-_steps_under_way(work) * _step_rows(work) // work.drawing_gpus)
    return min(work.max_running, here, held)


def _steps_under_way(work: Workload) -> int:
    """Whose answers are drawn at the same time."""
    return work.ahead + 1 if work.overlaps else 1


def _decode(work: Workload, gpu: Gpu) -> tuple[float, str]:
    """A step for every token of a completion, with the rows that run together. Nothing is faster than the longest
    answer drawn alone, of which the steps that are under way together each wait for a part."""
    cost, length, rows = decode_cost(work, gpu), _mid_length(work), _running_rows(work)
    turns = -(-_step_rows(work) // work.drawing_gpus) / rows
    alone = work.longest_tokens / _steps_under_way(work) * (cost.weights + cost.kernels + cost.sums + cost.row)
    by_reason = {
        "bandwidth: weights and keys are read": cost.weights + rows * length * cost.cached_token,
        "matrix rate": rows * cost.row,
        "launching kernels": cost.kernels,
        SUMS: cost.sums,
    }
    seconds = sum(by_reason.values()) * work.completion_tokens * turns
    if seconds < alone:
        return alone, "the longest answer"
    return seconds, max(by_reason, key=lambda why: by_reason[why])


def _reference(work: Workload, gpu: Gpu) -> tuple[float, str]:
    once = _groups(work) * _trained_share(work) * model_size(work).flops(_pass(work, has_backward=False))
    computed = len(work.frozen) * once / (_rate(work, gpu) * _reach(work))
    moved = sum(shape.parameters for shape in work.frozen) * work.itemsize / gpu.link if work.offload_frozen else 0.0
    return computed + moved, "link to the host: models are brought" if moved > computed else "matrix rate"


def _training(work: Workload, gpu: Gpu) -> tuple[float, str]:
    size, groups = model_size(work), _groups(work) * _trained_share(work)
    flops = groups * size.flops(_pass(work, has_backward=True))
    if work.choice.gradient_checkpointing:  # computed again, without the head
        flops += groups * 2 * (size.trained + size.frozen) * len(_pass(work, has_backward=False).positions)
    flops *= work.epochs
    if work.updates * work.epochs > 1:  # the proximal policy
        flops += groups * size.flops(_pass(work, has_backward=False))
    times = 2 if work.has_critic else 1
    return times * flops / (_rate(work, gpu) * _reach(work)), "matrix rate"


def _update(work: Workload, gpu: Gpu) -> tuple[float, str]:
    trained = (work.trained_parameters + (work.shape.parameters if work.has_critic else 0)) / work.share
    computed = trained * UPDATE_TRAFFIC[work.choice.states] / gpu.bandwidth
    moved = trained * state_bytes(work).host / gpu.link
    why = "link to the host: states come and go" if moved > computed else "bandwidth: states are read and written"
    return work.updates * work.epochs * max(moved, computed), why


def _exchange(work: Workload, gpu: Gpu, computing: float) -> tuple[float, str]:
    """What trainers wait for each other's weights and gradients, beyond the seconds in which they compute."""
    updates, models = work.updates * work.epochs, 2 if work.has_critic else 1
    seconds = updates * models * exchange_seconds(work, gpu, computing / (updates * models))
    sent = "layers are gathered, gradients added up" if work.share > 1 else "gradients are added up"
    sent += ", tokens sent to experts" if work.sends_to_experts else ""
    sent += ", tokens sent to all" if work.tensor > 1 else ", tokens sent to heads" if work.context > 1 else ""
    where = "network" if work.trainers > gpu.per_machine else "links between GPUs"
    return seconds, f"{where}: {sent}"
