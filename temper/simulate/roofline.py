"""Speeds from the planner's roofline: a model that nobody has run yet, on a GPU that is not here.

Owns: from the plan of a stage to Speeds. Refuses: the roofline itself (planning/seconds.py).
"""

from __future__ import annotations

from temper.planning.gpus import Gpu
from temper.planning.seconds import decode_cost, plan_seconds
from temper.planning.workload import AnswerLengths, Workload, with_lengths
from temper.simulate.speeds import Speeds


def roofline_speeds(work: Workload, gpu: Gpu, *, lengths: AnswerLengths | None = None) -> Speeds:
    """Of the GPUs that `work` is shared out over. `lengths`: None: all answers are the longest."""
    usual = with_lengths(work, lengths)
    seconds, decode = plan_seconds(usual, gpu).seconds, decode_cost(usual, gpu)
    rows = usual.rows_per_update * usual.updates
    prompts = rows / usual.group_size * max(1, usual.prompt_tokens) / usual.drawing_gpus
    trained = usual.trainer_rows * usual.updates * usual.row_tokens
    return Speeds(
        decode_step=decode.weights + decode.kernels + decode.sums,
        decode_row=decode.row,
        decode_kv=decode.cached_token,
        prefill_token=seconds.get("prompts", 0.0) / prompts,
        credit_token=seconds.get("reference", 0.0) / (rows * usual.completion_tokens),
        train_token=seconds["forward and backward"] / trained,
        train_step=seconds["update"] / usual.updates,
        exchange=seconds.get("exchange", 0.0) / usual.updates,
        publish=seconds.get("publishing", 0.0),
    )
