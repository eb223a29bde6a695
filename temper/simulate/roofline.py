"""Speeds from the planner's roofline: a model that nobody has run yet, on a GPU that is not here.

Owns: from the plan of a stage to Speeds. Refuses: the roofline itself (planning/seconds.py).
"""

from __future__ import annotations

from dataclasses import replace

from temper.planning.gpus import Gpu
from temper.planning.seconds import decode_cost, plan_seconds
from temper.planning.workload import Workload
from temper.simulate.speeds import Speeds

GRADIENT_TRIPS = 2
"""Times that gradients cross the link when trainers add them up: to be added, and back."""


def roofline_speeds(work: Workload, gpu: Gpu, *, mean_tokens: float, is_shared: bool) -> Speeds:
    """`mean_tokens`: of a completion. `is_shared`: sampler and trainer are on the same GPUs."""
    usual = replace(work, completion_tokens=max(1, round(mean_tokens)))
    seconds, decode = plan_seconds(usual, gpu).seconds, decode_cost(usual, gpu)
    rows = usual.rows_per_update * usual.updates
    drawn, trained = rows * usual.completion_tokens, rows * usual.row_tokens
    prompts = rows / usual.group_size * max(1, usual.prompt_tokens)
    weight_bytes = usual.shape.parameters * usual.itemsize
    return Speeds(
        decode_step=decode.weights + decode.kernels,
        decode_row=decode.row,
        decode_kv=decode.cached_token,
        prefill_token=seconds.get("prompts", 0.0) / prompts,
        credit_token=seconds.get("reference", 0.0) / drawn,
        train_token=seconds["forward and backward"] / trained,
        train_step=seconds["update"] / usual.updates,
        exchange=GRADIENT_TRIPS * usual.trained_parameters * usual.itemsize / gpu.link,
        publish=seconds.get("publishing", 0.0) if is_shared else weight_bytes / gpu.link,
    )
